"""Missing senders and hung or dead TP ranks in the middle of an update.

The last test kills the engine.
"""

import dataclasses
import signal
import time

import pytest

from megarl.errors import WeightSyncError, WorkerError
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, box_bucket, boxes_of, requests, sync_boxes
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS

ROUND_SECONDS, ANSWER_SECONDS = 2.0, 3.0
SLACK = 4.0
"""Slack for timeouts on a busy machine, in seconds."""


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
def rounds(layouts, model_dir):
    """Buckets of version 6 in two rounds, indexed [round][TP rank]."""
    weights = reference.changed(model_dir, seed=6)
    buckets = [[box_bucket(boxes_of(layout, weights)[i::2]) for layout in layouts] for i in range(2)]
    yield [[bucket for _, bucket in ranks] for ranks in buckets]
    for ranks in buckets:
        for buffer, _ in ranks:
            buffer.close()


def assert_serves(engine, model_dir, weights, version):
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert {v for g in generations for v in g.policy_versions} == {version}
    assert engine.call("health").policy_version == version


def failures(calls, seconds):
    """Return the exceptions of the calls, which must all fail within `seconds`."""
    end = time.monotonic() + seconds
    return [call.exception(max(0.0, end - time.monotonic())) for call in calls]


def test_every_sender_learns_whose_boxes_are_missing(engine, rounds, model_dir, served):
    """Rank 0's sender delivers two rounds, rank 1's none."""
    engine.call("begin_weights")
    calls = [engine.submit("load_boxes", 0, i, rounds[i][0]) for i in range(2)]
    missing = r"round [01] of the weights did not come from TP rank 1 of 2 within 2 s"
    for error in failures(calls, ROUND_SECONDS + SLACK):
        with pytest.raises(WeightSyncError, match=missing):
            raise error
    with pytest.raises(WeightSyncError, match=missing):
        engine.call("load_boxes", 1, 0, rounds[0][1])
    with pytest.raises(WeightSyncError, match=missing):
        engine.call("end_weights", 6)
    assert_serves(engine, model_dir, served, 5)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("rank", [0, 1])
def test_hung_rank_is_reported_and_the_next_update_repairs_the_engine(engine, layouts, rounds, model_dir, rank):
    """Rank 0 forwards commands and waits for rank 1: neither answers if either is stopped."""
    engine.call("begin_weights")
    for call in [engine.submit("load_boxes", r, 0, rounds[0][r]) for r in (0, 1)]:
        call.result(30)
    process = engine.scheduler_processes()[rank]
    unanswered = rf"TP rank {rank} \(pid {process.pid}, stopped\).* did not answer round 1 of the weights within 3 s$"
    process.send_signal(signal.SIGSTOP)
    try:
        calls = [engine.submit("load_boxes", r, 1, rounds[1][r]) for r in (0, 1)]
        for error in failures(calls, ANSWER_SECONDS + SLACK):
            with pytest.raises(WeightSyncError, match=unanswered):
                raise error
        for method, arguments in {"end_weights": (6,), "generate_many": (requests(PROMPTS),)}.items():
            with pytest.raises(WeightSyncError, match=r"did not answer round 1|parts of version 5"):
                engine.call(method, *arguments)
        late = engine.submit("begin_weights")
        with pytest.raises(WeightSyncError, match=r"has not answered round 1 .* yet, .* must be restarted"):
            late.result(ANSWER_SECONDS + SLACK)
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
        with pytest.raises(WeightSyncError, match=r"the engine did not answer begin_weight_update within 3 s"):
            begin.result(ANSWER_SECONDS + SLACK)
        with pytest.raises(WeightSyncError, match=r"paused for an update that failed .*begin_weight_update"):
            engine.generate(PROMPTS)
    finally:
        process.send_signal(signal.SIGCONT)
    sync_boxes(engine, layouts, served, 6)
    assert_serves(engine, model_dir, served, 6)


@pytest.mark.usefixtures("served")
def test_dead_rank_fails_every_sender_and_the_engine(engine, rounds):
    """Fails senders of a command without reply, and one that waits for another sender."""
    engine.call("begin_weights")
    for call in [engine.submit("load_boxes", r, 0, rounds[0][r]) for r in (0, 1)]:
        call.result(30)
    process = engine.scheduler_processes()[1]
    process.send_signal(signal.SIGSTOP)  # else the command may be answered before the rank is dead
    calls = [engine.submit("load_boxes", r, 1, rounds[1][r]) for r in (0, 1)]
    calls.append(engine.submit("load_boxes", 0, 2, None))
    time.sleep(0.3)
    assert not any(call.done() for call in calls)
    process.kill()
    dead = r"scheduler process of TP rank 1 was ended by SIGKILL"
    for error in failures(calls, ROUND_SECONDS):
        with pytest.raises(WorkerError, match=dead):
            raise error
    for method, *arguments in [
        ("load_boxes", 1, 2, None),
        ("end_weights", 6),
        ("begin_weights",),
        ("generate_many", requests(PROMPTS)),
        ("health",),
    ]:
        with pytest.raises(WorkerError, match=dead):
            engine.submit(method, *arguments).result(ROUND_SECONDS)
