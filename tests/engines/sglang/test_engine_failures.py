import asyncio
import dataclasses
import shutil
import signal
import socket
from contextlib import closing

import psutil
import pytest

from megarl.engines.sglang.sglang_engine import SglangEngine
from megarl.errors import ConfigError, LostEngineError, WorkerError
from tests.engines.remote import RemoteEngine, begin_requests, requests, started
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, wait_until

PROMPT = [1, 2, 3]


def has_exited(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_all_exit(processes):
    assert wait_until(lambda: all(map(has_exited, processes))), [p for p in processes if not has_exited(p)]


def schedulers(engine):
    """Return the schedulers that the host has started; they are forked from a server."""
    return [scheduler for child in psutil.Process(engine.process.pid).children() for scheduler in child.children()]


def test_killed_scheduler_fails_current_and_later_calls(spec):
    with started(spec) as engine:
        (scheduler,) = engine.scheduler_processes()
        scheduler.suspend()
        pending = engine.submit("generate_many", requests([PROMPT] * 4, max_new_tokens=480))
        scheduler.kill()
        with expect_error(WorkerError, "TP", "0", "SIGKILL"):
            pending.result(HANG_SECONDS)
        for method in ("health", "begin_weights", "abort_all"):
            with pytest.raises(WorkerError, match="SIGKILL"):
                engine.call(method)
    assert engine.process.returncode == 0


def test_shutdown_fails_the_requests_in_flight(spec):
    with started(spec, tp=2) as engine:
        running = engine.scheduler_processes()
        pending = engine.submit("generate_many", requests([PROMPT] * 4, max_new_tokens=480))
        engine.call("shutdown")
        with expect_error(WorkerError, "engine"):
            pending.result(HANG_SECONDS)
        assert not any(p.is_running() for p in running)
        with expect_error(WorkerError, "shut", "down"):
            engine.generate([PROMPT])


def test_failed_start_reports_the_log_tail(spec, model_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    logs = tmp_path / "logs"
    with closing(RemoteEngine(dataclasses.replace(spec, model_path=str(broken), log_dir=str(logs)))) as engine:
        with expect_error(WorkerError, "Error", "scheduler-", "start"):
            engine.call("start")
        assert len(list(logs.glob("scheduler-*.log"))) == 1
        with expect_error(WorkerError, "running"):
            engine.call("generate_many", requests([PROMPT]))


def test_scheduler_killed_during_startup_is_a_lost_engine(spec):
    waiting = dataclasses.replace(spec, waits_for_memory=True)  # for which it waits for ever
    with closing(RemoteEngine(waiting)) as engine:
        start = engine.submit("start")
        assert wait_until(lambda: schedulers(engine))
        for process in schedulers(engine):
            process.kill()
        with expect_error(LostEngineError, "engine", "start"):
            start.result(HANG_SECONDS)


def test_start_timeout_stops_the_engine(spec):
    with closing(RemoteEngine(dataclasses.replace(spec, start_timeout_seconds=0.1))) as engine:
        with expect_error(WorkerError, "0.1", "within", "start"):
            engine.call("start")
        assert not schedulers(engine)


@pytest.mark.parametrize("moment", ["while it generates", "while it starts"])
def test_schedulers_die_with_a_killed_host(spec, moment):
    engine = RemoteEngine(spec)
    host = psutil.Process(engine.process.pid)
    start = engine.submit("start")
    if moment == "while it starts":
        assert wait_until(lambda: len(host.children()) > 1)
    else:
        start.result(HANG_SECONDS)
        begin_requests(engine, [PROMPT] * 4, max_new_tokens=480)
    children = host.children(recursive=True)
    assert children
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait()
    assert_all_exit(children)
    engine.close()


def test_port_in_use_raises_before_startup(spec):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        engine = SglangEngine(dataclasses.replace(spec, port=port))
        with pytest.raises(ConfigError, match=rf"^rollout\.engine\.base_port: port {port} is in use$"):
            asyncio.run(engine.start())


def test_engine_that_was_not_started_raises(spec):
    with expect_error(WorkerError, "running"):
        asyncio.run(SglangEngine(spec).begin_weights())
