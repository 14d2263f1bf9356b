"""Hung or dead TP ranks in the middle of an update.

The last test kills the engine.
"""

import dataclasses
import signal
import time

import pytest

from megarl.errors import WeightSyncError, WorkerError
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, Senders, boxes_of, requests, sync_boxes
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS
from tests.time_limits import HANG_SECONDS

ROUND_SECONDS, ANSWER_SECONDS, STALL_SECONDS = 4.0, 6.0, 3.0


@pytest.fixture(scope="module")
def engine(spec):
    timeouts = {"round_timeout_seconds": ROUND_SECONDS, "answer_timeout_seconds": ANSWER_SECONDS}
    engine = RemoteEngine(dataclasses.replace(spec, tp=2, **timeouts))
    engine.call("start")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def layouts(engine):
    return engine.call("layouts")


@pytest.fixture
def served(engine, layouts, model_dir):
    """Weights that the engine serves as version 5."""
    weights = reference.changed(model_dir, seed=5)
    sync_boxes(engine, layouts, weights, 5)
    return weights


@pytest.fixture
def senders(engine, layouts, model_dir):
    """Senders of version 6 in two rounds, for both TP ranks."""
    weights = reference.changed(model_dir, seed=6)
    ranks = [boxes_of(layout, weights) for layout in layouts]
    with Senders(engine, [[boxes[i::2] for boxes in ranks] for i in range(2)], STALL_SECONDS) as senders:
        yield senders


def assert_serves(engine, model_dir, weights, version):
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert {v for g in generations for v in g.policy_versions} == {version}
    assert engine.call("health").policy_version == version


def begin_and_send_one_round(engine, senders):
    """Return the future of the engine's `receive_weights`, in the middle of an update."""
    senders.prepare()
    engine.call("begin_weights")
    receiving = engine.submit("receive_weights")
    senders.begin()
    for wait in senders.send(0):
        wait()
    return receiving


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("rank", [0, 1])
def test_hung_rank_is_reported_and_the_next_update_repairs_the_engine(engine, layouts, senders, model_dir, rank):
    process = engine.scheduler_processes()[rank]
    receiving = begin_and_send_one_round(engine, senders)
    what = "the command to receive weights"
    seconds = ANSWER_SECONDS + ROUND_SECONDS
    unanswered = rf"TP rank {rank} \(pid {process.pid}, stopped\).* did not answer {what} within {seconds:g} s$"
    process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        for wait in senders.send(1):
            wait()
        assert time.monotonic() - start >= STALL_SECONDS
        stalled = f"engine 0 rank {rank} did not copy its weights within {STALL_SECONDS:g} s"
        assert senders.failures == [stalled if r == rank else "" for r in (0, 1)]
        with pytest.raises(WeightSyncError, match=unanswered):
            receiving.result(HANG_SECONDS)
        for method, arguments in {"end_weights": (6,), "generate_many": (requests(PROMPTS),)}.items():
            with pytest.raises(WeightSyncError, match=rf"did not answer {what}|parts of version 5"):
                engine.call(method, *arguments)
        late = engine.submit("begin_weights")
        with pytest.raises(WeightSyncError, match=rf"has not answered {what} yet, .* must be restarted"):
            late.result(HANG_SECONDS)
    finally:
        process.send_signal(signal.SIGCONT)
    with pytest.raises(WeightSyncError, match="parts of version 5"):
        engine.generate(PROMPTS)
    assert engine.call("health").policy_version == 5
    weights = reference.changed(model_dir, seed=7)
    sync_boxes(engine, layouts, weights, 7)
    assert_serves(engine, model_dir, weights, 7)


def test_update_that_cannot_begin_blocks_generation_until_the_next(engine, layouts, model_dir, served):
    process = engine.scheduler_processes()[1]
    process.send_signal(signal.SIGSTOP)
    try:
        begin = engine.submit("begin_weights")
        with pytest.raises(
            WeightSyncError, match=f"the engine did not answer begin_weight_update within {ANSWER_SECONDS:g} s"
        ):
            begin.result(HANG_SECONDS)
        with pytest.raises(WeightSyncError, match=r"paused for an update that failed .*begin_weight_update"):
            engine.generate(PROMPTS)
    finally:
        process.send_signal(signal.SIGCONT)
    sync_boxes(engine, layouts, served, 6)
    assert_serves(engine, model_dir, served, 6)


@pytest.mark.usefixtures("served")
def test_dead_rank_ends_the_engine_but_not_its_senders(engine, senders):
    process = engine.scheduler_processes()[1]
    receiving = begin_and_send_one_round(engine, senders)
    process.kill()
    for wait in senders.send(1):
        wait()
    assert senders.failures[1].startswith("engine 0 rank 1 has closed its connection")
    dead = r"scheduler process of TP rank 1 was ended by SIGKILL"
    for method, *arguments in [
        ("receive_weights",),
        ("end_weights", 6),
        ("begin_weights",),
        ("generate_many", requests(PROMPTS)),
        ("health",),
    ]:
        call = receiving if method == "receive_weights" else engine.submit(method, *arguments)
        with pytest.raises(WorkerError, match=dead):
            call.result(HANG_SECONDS)
