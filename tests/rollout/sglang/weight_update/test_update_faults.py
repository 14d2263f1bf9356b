"""Hung or dead TP ranks in the middle of an update.

The last test kills the engine.
"""

import pytest

from megarl.errors import WeightSyncError, WorkerError
from tests.rollout import reference
from tests.rollout.remote import Senders, boxes_of, requests, started, sync_boxes
from tests.rollout.sglang.serving import PROMPTS, assert_blocked, assert_completes
from tests.time_limits import HANG_SECONDS

STALL_SECONDS = 1.0
RECEIVE = "the command to receive weights"


@pytest.fixture(scope="module")
def engine(spec):
    with started(spec, tp=2) as engine:
        yield engine


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
    with Senders(engine, [[boxes[i::2] for boxes in ranks] for i in range(2)]) as senders:
        yield senders


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
    senders.ranks[rank]._stall_seconds = STALL_SECONDS
    process.suspend()
    try:
        for wait in senders.send(1):
            wait()
        stalled = f"engine 0 rank {rank} did not copy its weights within {STALL_SECONDS:g} s"
        assert senders.failures == [stalled if r == rank else "" for r in (0, 1)]
        engine.call("pass_time_limit", RECEIVE)
        unanswered = rf"TP rank {rank} \(pid {process.pid}, stopped\).* did not answer {RECEIVE} within 2400 s$"
        with pytest.raises(WeightSyncError, match=unanswered):
            receiving.result(HANG_SECONDS)
        for method, arguments in {"end_weights": (6,), "generate_many": (requests(PROMPTS),)}.items():
            with pytest.raises(WeightSyncError, match=rf"did not answer {RECEIVE}|parts of version 5"):
                engine.call(method, *arguments)
        late = engine.submit("begin_weights")
        engine.call("pass_time_limit", RECEIVE)
        with pytest.raises(WeightSyncError, match=rf"has not answered {RECEIVE} yet, .* must be restarted"):
            late.result(HANG_SECONDS)
    finally:
        process.resume()
    assert_blocked(engine, 5)
    assert engine.call("health").policy_version == 5
    weights = reference.changed(model_dir, seed=7)
    sync_boxes(engine, layouts, weights, 7)
    assert_completes(engine, model_dir, weights, 7)


def test_update_that_cannot_begin_blocks_generation_until_the_next(engine, layouts, model_dir, served):
    process = engine.scheduler_processes()[1]
    process.suspend()
    try:
        begin = engine.submit("begin_weights")
        engine.call("pass_time_limit", "begin_weight_update")
        with pytest.raises(WeightSyncError, match="the engine did not answer begin_weight_update within 1200 s"):
            begin.result(HANG_SECONDS)
        with pytest.raises(WeightSyncError, match=r"paused for an update that failed .*begin_weight_update"):
            engine.generate(PROMPTS)
    finally:
        process.resume()
    sync_boxes(engine, layouts, served, 6)
    assert_completes(engine, model_dir, served, 6)


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
