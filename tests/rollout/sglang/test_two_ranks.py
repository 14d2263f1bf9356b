import pytest
import torch

from megarl.errors import ConfigError, WeightSyncError, WorkerError
from megarl.process.ports import find_unused_port
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.bucket import digest
from megarl.reshard.transfer.sample_digests import ExpectedBox
from megarl.rollout.sglang.engine_host import check_port
from megarl.rollout.sglang.weight_layout.offline_trace import trace_layouts
from tests.rollout import reference
from tests.rollout.remote import (
    Senders,
    boxes_of,
    fork_traces,
    requests,
    send_bucket,
    send_rounds,
    started,
    sync,
    sync_boxes,
)
from tests.rollout.sglang.serving import PROMPTS, assert_blocked, assert_completes, assert_serves
from tests.rollout.sglang.test_in_flight import Versions, check_spans, generate_during_pushes, prompts
from tests.time_limits import HANG_SECONDS

PORT = find_unused_port()


@pytest.fixture(scope="module")
def engine(spec, uneven_dir):
    with started(spec, model_path=uneven_dir, tp=2, port=PORT) as engine:
        yield engine


def test_each_rank_holds_its_shard(engine, uneven_dir, tmp_path):
    for version in (1, 2):
        weights = reference.changed(uneven_dir, seed=version)
        engine.call("randomize_weights")
        sync(engine, weights, version)
        assert_serves(engine, uneven_dir, weights, version, tmp_path, tp=2)


def test_tokens_name_the_version_that_sampled_them(engine, uneven_dir):
    versions, batch = Versions(uneven_dir, 4), prompts(12)
    generations = generate_during_pushes(engine, versions, batch, max_new_tokens=400)
    boundaries, noticed = check_spans(versions, batch, generations)
    assert boundaries >= 6
    assert noticed >= 0.9 * boundaries


def test_each_rank_rejects_an_invalid_bucket(engine):
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match=r"TP rank 0: nonsense is no .*; TP rank 1: nonsense is no "):
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
    fork_traces(monkeypatch)
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
        with pytest.raises(
            WeightSyncError,
            match=r"^TP rank 1: .*round 0 of the weights did not come from trainer rank 1 in 1 s$",
        ):
            receiving.result(HANG_SECONDS)
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
        with pytest.raises(WeightSyncError, match=r"^TP rank 1: .* does not know which boxes it receives"):
            engine.call("receive_weights")
    assert_serves(engine, uneven_dir, served, 5, tmp_path, tp=2)
    sync_boxes(engine, layouts, weights, 13)
    assert_serves(engine, uneven_dir, weights, 13, tmp_path, tp=2)


NUM_SAMPLES = 16


def expected_boxes(samples, weights):
    return [
        ExpectedBox(sample.tp_rank, sample.tensor, sample.box, digest(weights[sample.tensor][slices(sample.box)]))
        for sample in samples
    ]


def send(engine, way, layouts, weights):
    if way == "boxes":
        send_rounds(engine, [[boxes_of(layout, weights) for layout in layouts]])
    else:
        send_bucket(engine, weights)


@pytest.mark.parametrize("way", ["boxes", "full tensors"])
def test_update_passes_if_the_weights_have_arrived(engine, layouts, uneven_dir, way):
    weights = reference.changed(uneven_dir, seed=1)
    samples = engine.call("sample_boxes", 1, NUM_SAMPLES)
    assert len(samples) == NUM_SAMPLES
    assert {sample.tp_rank for sample in samples} == {0, 1}
    assert samples == engine.call("sample_boxes", 1, NUM_SAMPLES)
    assert samples != engine.call("sample_boxes", 2, NUM_SAMPLES)
    engine.call("begin_weights")
    send(engine, way, layouts, weights)
    assert engine.call("verify_weights", expected_boxes(samples, weights)) is None
    engine.call("end_weights", 1)
    assert_completes(engine, uneven_dir, weights, 1)


@pytest.mark.parametrize("way", ["boxes", "full tensors"])
def test_one_changed_element_is_found_and_the_engine_does_not_serve(engine, layouts, uneven_dir, way):
    weights = reference.changed(uneven_dir, seed=2)
    samples = engine.call("sample_boxes", 3, NUM_SAMPLES)
    wrong = samples[NUM_SAMPLES // 2]
    sent = {name: tensor.clone() for name, tensor in weights.items()}
    last = sent[wrong.tensor][slices(wrong.box)].view(-1) if len(wrong.box) == 1 else None
    if last is None:
        last = sent[wrong.tensor][slices(wrong.box)][-1]
    last[-1] *= 1 + 2**-22
    engine.call("begin_weights")
    send(engine, way, layouts, sent)
    problem = engine.call("verify_weights", expected_boxes(samples, weights))
    assert problem.startswith(f"TP rank {wrong.tp_rank} does not hold the values of {wrong.tensor} [")
    with pytest.raises(
        WeightSyncError, match="end_weights needs begin_weights first; the last update was closed: TP rank"
    ):
        engine.call("end_weights", 3)
    with pytest.raises(WeightSyncError, match="an update that failed"):
        engine.generate(PROMPTS)
    sync(engine, weights, 4)
    assert_completes(engine, uneven_dir, weights, 4)


def test_boxes_are_compared_within_an_update_only(engine):
    with pytest.raises(WeightSyncError, match="verify_weights needs begin_weights first"):
        engine.call("verify_weights", [])


@pytest.mark.usefixtures("engine")
def test_engine_uses_the_configured_port():
    with pytest.raises(ConfigError, match=f"port {PORT} is in use"):
        check_port(PORT)


def test_shutdown_fails_the_requests_in_flight(engine):
    """Must be the last test of this module, because it shuts the engine down."""
    schedulers = engine.scheduler_processes()
    pending = engine.submit("generate_many", requests(PROMPTS, max_new_tokens=480))
    engine.call("shutdown")
    with pytest.raises(WorkerError, match="the engine was shut down"):
        pending.result(HANG_SECONDS)
    assert not any(p.is_running() for p in schedulers)
    with pytest.raises(WorkerError, match="shut down"):
        engine.generate(PROMPTS)
