import dataclasses
import socket

import pytest
import torch

from megarl.errors import ConfigError, WeightSyncError, WorkerError
from megarl.rollout.host import check_port
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, requests, send_bucket, sync
from tests.rollout.test_weights import PROMPTS, assert_engine_holds


@pytest.fixture(scope="module")
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def engine(spec, port):
    engine = RemoteEngine(dataclasses.replace(spec, tp=2, port=port))
    engine.call("start")
    yield engine
    engine.close()


def test_each_rank_holds_its_shard(engine, model_dir, tmp_path):
    for version in (1, 2):
        weights = reference.changed(model_dir, seed=version)
        engine.call("randomize_weights")
        sync(engine, weights, version)
        assert_engine_holds(engine, weights, tmp_path, tp=2)
        generations = engine.generate(PROMPTS)
        assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
        assert {v for g in generations for v in g.policy_versions} == {version}


def test_each_rank_refuses_a_bad_bucket(engine):
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match=r"TP rank 0: nonsense is no .*; TP rank 1: nonsense is no "):
        send_bucket(engine, {"nonsense": torch.zeros(3)})
    assert len(engine.generate(PROMPTS)) == len(PROMPTS)


@pytest.mark.usefixtures("engine")
def test_the_configured_port_is_the_one_in_use(port):
    with pytest.raises(ConfigError, match=f"port {port} is in use"):
        check_port(port)


def test_shutdown_fails_the_requests_in_flight(engine):
    """The last one of this engine."""
    schedulers = engine.scheduler_processes()
    pending = engine.submit("generate_many", requests(PROMPTS, max_new_tokens=480))
    engine.call("shutdown")
    with pytest.raises(WorkerError, match="the engine was shut down"):
        pending.result(5)
    assert not any(p.is_running() for p in schedulers)
    with pytest.raises(WorkerError, match="shut down"):
        engine.generate(PROMPTS)
