"""An engine with two TP ranks: weights in each, and ranks that hang or die in the middle of an update."""

import pytest
import torch

from megarl.cluster.process.ports import find_unused_port
from megarl.engines.sglang.engine_host import check_port
from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
from megarl.errors import ConfigError, WeightSyncError, WorkerError
from megarl.reshard.layout.layout import contains
from tests.engines import reference, remote
from tests.engines.remote import (
    Senders,
    boxes_of,
    requests,
    send_bucket,
    send_rounds,
    started,
    sums_of,
    sync,
    sync_boxes,
)
from tests.engines.sglang.serving import PROMPTS, assert_blocked, assert_completes, assert_serves
from tests.engines.sglang.test_in_flight import Versions, check_spans, generate_during_pushes, prompts
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS


@pytest.fixture(scope="module")
def port():
    return find_unused_port()


@pytest.fixture(scope="module")
def engine(spec, uneven_dir, port):
    with started(spec, model_path=uneven_dir, tp=2, port=port) as engine:
        yield engine


def test_each_rank_holds_its_shard(engine, uneven_dir, tmp_path):
    for version in (1, 2):
        weights = reference.changed(uneven_dir, seed=version)
        engine.call("randomize_weights")
        sync(engine, weights, version)
        assert_serves(engine, uneven_dir, weights, version, tmp_path, tp=2)


def test_tokens_name_the_version_that_sampled_them(engine, uneven_dir):
    versions, batch = Versions(uneven_dir, 4), prompts(12)
    generations, _ = generate_during_pushes(engine, versions, batch, max_new_tokens=400)
    boundaries, noticed = check_spans(versions, batch, generations)
    assert boundaries >= 6
    assert noticed >= 0.9 * boundaries


def test_each_rank_rejects_an_invalid_bucket(engine):
    engine.call("begin_weights")
    with expect_error(WeightSyncError, "TP", "0", "1", "nonsense"):
        send_bucket(engine, {"nonsense": torch.zeros(3)})
    assert len(engine.generate(PROMPTS)) == len(PROMPTS)


@pytest.fixture(scope="module")
def layouts(engine):
    return engine.call("layouts")


@pytest.fixture
def served(engine, layouts, uneven_dir):
    """Sync new weights as version 5 and return them."""
    weights = reference.changed(uneven_dir, seed=5)
    sync_boxes(engine, layouts, weights, 5)
    return weights


def test_boxes_arrive_bit_for_bit_in_each_rank(engine, layouts, uneven_dir, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(uneven_dir, seed=version)
        engine.call("randomize_weights")
        sync_boxes(engine, layouts, weights, version, num_rounds=2 * version)
        assert_serves(engine, uneven_dir, weights, version, tmp_path, tp=2)


def test_layouts_match_the_offline_trace(layouts, uneven_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote.fork_traces(monkeypatch)
    assert layouts == trace_layouts(uneven_dir, tp=2)


def test_rank_without_boxes_sends_none(engine, layouts, uneven_dir, tmp_path):
    weights = reference.changed(uneven_dir, seed=11)
    first, second = (boxes_of(layout, weights) for layout in layouts)
    engine.call("begin_weights")
    send_rounds(engine, [[first, None], [None, second]])
    engine.call("end_weights", 11)
    assert_serves(engine, uneven_dir, weights, 11, tmp_path, tp=2)


def test_rank_whose_boxes_are_missing_is_named(engine, layouts, uneven_dir, served, tmp_path):
    engine.call("begin_weights")
    with Senders(engine, [[boxes_of(layout, served) for layout in layouts]]) as senders:
        senders.prepare()
        senders.begin()
        first, _ = senders.ranks
        copied = first.load_boxes(0, senders.buckets[0][0])
        engine.call("set_round_seconds", 1.0)
        receiving = engine.submit("receive_weights")
        copied()
        message = r"^TP rank 1: .*round 0 of the weights did not come from trainer rank 1 in 1 s$"
        with pytest.raises(WeightSyncError, match=message):
            receiving.result(HANG_SECONDS)
        engine.call("set_round_seconds", UNREACHED_SECONDS)
    assert_blocked(engine, 5)
    sync_boxes(engine, layouts, served, 5)
    assert_serves(engine, uneven_dir, served, 5, tmp_path, tp=2)


BAD_BOX = {
    "a parameter that is none": (("nonsense", ((0, 1),), torch.zeros(1)), "nonsense is no parameter of the engine"),
    "a box twice": (("model.norm.weight", ((0, 8),), torch.zeros(8)), r"\[0:8\] is also written as part of"),
}


@pytest.mark.parametrize("case", BAD_BOX)
def test_box_that_one_rank_rejects_ends_the_preparation(engine, layouts, uneven_dir, served, tmp_path, case):
    bad, message = BAD_BOX[case]
    weights = reference.changed(uneven_dir, seed=13)
    first, second = (boxes_of(layout, weights) for layout in layouts)
    with Senders(engine, [[first, [*second, bad]]]) as senders:
        with pytest.raises(WeightSyncError, match=rf"^TP rank 1: [^;]*{message}[^;]*$"):
            senders.prepare()
        engine.call("begin_weights")
        with expect_error(WeightSyncError, "TP", "1", "receives", "which"):
            engine.call("receive_weights")
    assert_serves(engine, uneven_dir, served, 5, tmp_path, tp=2)
    sync_boxes(engine, layouts, weights, 13)
    assert_serves(engine, uneven_dir, weights, 13, tmp_path, tp=2)


def send(engine, way, layouts, weights):
    if way == "boxes":
        send_rounds(engine, [[boxes_of(layout, weights) for layout in layouts]])
    else:
        send_bucket(engine, weights)


@pytest.mark.parametrize("way", ["boxes", "full tensors"])
def test_update_passes_if_the_weights_have_arrived(engine, layouts, uneven_dir, way):
    weights = reference.changed(uneven_dir, seed=1)
    engine.call("begin_weights")
    send(engine, way, layouts, weights)
    assert engine.call("verify_weights", sums_of(layouts, weights)) is None
    engine.call("end_weights", 1)
    assert_completes(engine, uneven_dir, weights, 1)


@pytest.mark.parametrize("way", ["boxes", "full tensors"])
def test_one_flipped_bit_is_found_and_the_engine_does_not_serve(engine, layouts, uneven_dir, way):
    weights = reference.changed(uneven_dir, seed=2)
    rank, piece = 1, layouts[1].pieces[len(layouts[1].pieces) // 2]
    sent = {name: tensor.clone() for name, tensor in weights.items()}
    element = tuple(stop - 1 for _, stop in piece.box)
    sent[piece.tensor].view(torch.int32)[element] ^= 1
    engine.call("begin_weights")
    send(engine, way, layouts, sent)
    problem = engine.call("verify_weights", sums_of(layouts, weights))
    holders = [number for number, layout in enumerate(layouts) if holds(layout, piece.tensor, element)]
    assert rank in holders
    assert problem.startswith(f"TP rank {holders[0]} does not hold the values of {piece.tensor} [")
    closed = "end_weights needs begin_weights first; the last update was closed: TP rank"
    with pytest.raises(WeightSyncError, match=closed):
        engine.call("end_weights", 3)
    with expect_error(WeightSyncError, "update", "failed"):
        engine.generate(PROMPTS)
    sync(engine, weights, 4)
    assert_completes(engine, uneven_dir, weights, 4)


def holds(layout, tensor, element):
    """Return whether the layout has a piece with this element."""
    inside = tuple((index, index + 1) for index in element)
    return any(piece.tensor == tensor and contains(piece.box, inside) for piece in layout.pieces)


def test_boxes_are_compared_within_an_update_only(engine):
    with expect_error(WeightSyncError, "verify_weights", "begin_weights"):
        engine.call("verify_weights", [])


@pytest.mark.usefixtures("engine")
def test_engine_uses_the_configured_port(port):
    with pytest.raises(ConfigError, match=f"port {port} is in use"):
        check_port(port)


STALL_SECONDS = 1.0
RECEIVE = "the command to receive weights"


@pytest.fixture
def senders(engine, layouts, uneven_dir):
    """Senders of version 6 in two rounds, for both TP ranks."""
    weights = reference.changed(uneven_dir, seed=6)
    ranks = [boxes_of(layout, weights) for layout in layouts]
    with Senders(engine, [[boxes[i::2] for boxes in ranks] for i in range(2)]) as senders:
        yield senders


def begin_and_send_one_round(engine, senders):
    """Return the future of the engine's `receive_weights`, in the middle of an update."""
    senders.prepare()
    engine.call("begin_weights")
    receiving = senders.receive()
    senders.complete(0)
    return receiving


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("rank", [0, 1])
def test_hung_rank_is_reported_and_the_next_update_repairs_the_engine(engine, layouts, senders, uneven_dir, rank):
    process = engine.scheduler_processes()[rank]
    receiving = begin_and_send_one_round(engine, senders)
    senders.ranks[rank].stall_seconds = STALL_SECONDS
    process.suspend()
    try:
        senders.complete(1)
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
    weights = reference.changed(uneven_dir, seed=7)
    sync_boxes(engine, layouts, weights, 7)
    assert_completes(engine, uneven_dir, weights, 7)


def test_update_that_cannot_begin_blocks_generation_until_the_next(engine, layouts, uneven_dir, served):
    process = engine.scheduler_processes()[1]
    process.suspend()
    try:
        begin = engine.submit("begin_weights")
        engine.call("pass_time_limit", "begin_weight_update")
        with expect_error(WeightSyncError, "begin_weight_update", "1200"):
            begin.result(HANG_SECONDS)
        with expect_error(WeightSyncError, "begin_weight_update"):
            engine.generate(PROMPTS)
    finally:
        process.resume()
    sync_boxes(engine, layouts, served, 6)
    assert_completes(engine, uneven_dir, served, 6)


@pytest.mark.usefixtures("served")
@pytest.mark.last
def test_dead_rank_ends_the_engine_but_not_its_senders(engine, senders):
    process = engine.scheduler_processes()[1]
    receiving = begin_and_send_one_round(engine, senders)
    process.kill()
    senders.complete(1)
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
