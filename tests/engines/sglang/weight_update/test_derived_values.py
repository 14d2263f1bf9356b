"""Updates of a model whose engine computes values from its weights: Gemma 2 keeps 1 + w for every norm."""

import dataclasses

import pytest
import torch
from transformers import Gemma2Config

from megarl.engines.sglang.weight_layout.offline_trace import trace_engine
from megarl.engines.sglang.weight_update.update_session import full_tensors
from megarl.errors import WeightSyncError
from tests.engines import reference
from tests.engines.conftest import SIZES, save_tiny
from tests.engines.remote import Senders, boxes_of, fork_traces, send_bucket, send_rounds, started, sums_of
from tests.engines.sglang.serving import PROMPTS, assert_blocked, assert_completes
from tests.engines.sglang.weight_update.test_network_receive import World
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS

TP = 2
NUM_NORMS = 9
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "gemma2"
    act = "gelu_pytorch_tanh"  # as published folders have it; SGLang reads it
    config = Gemma2Config(**SIZES, hidden_act=act, query_pre_attn_scalar=32, sliding_window=256)
    save_tiny(folder, config, norms=(-0.5, 0.5))
    return str(folder)


@pytest.fixture(scope="module")
def gemma_spec(spec, gemma_dir):
    return dataclasses.replace(spec, model_path=gemma_dir, tp=TP)


@pytest.fixture(scope="module")
def engine(gemma_spec):
    with started(gemma_spec) as engine:
        yield engine


@pytest.fixture(scope="module")
def full_names(engine):
    return engine.call("full_tensors")


def rank_boxes(engine, weights, without):
    return [boxes_of(layout, weights, without) for layout in engine.call("layouts")]


def begin(engine, weights, full_names):
    """Send derived tensors in full, and everything else as boxes in two rounds."""
    boxes = rank_boxes(engine, weights, full_names)
    engine.call("begin_weights")
    send_bucket(engine, {name: weights[name] for name in full_names})
    send_rounds(engine, [[boxes_of_rank[part::2] for boxes_of_rank in boxes] for part in range(2)])


def update(engine, weights, full_names, version):
    begin(engine, weights, full_names)
    engine.call("end_weights", version)


def held(engine, folder):
    """Return the parameters and buffers of each rank."""
    folder.mkdir(exist_ok=True)
    engine.call("read_weights", str(folder))
    return [torch.load(folder / f"rank{rank}.pt") | torch.load(folder / f"rank{rank}.buffers.pt") for rank in range(TP)]


def assert_recomputed(tensors):
    computed = {name for name in tensors if name.endswith(".gemma_weight")}
    assert len(computed) == NUM_NORMS
    for name in computed:
        assert torch.equal(tensors[name], 1 + tensors[name.replace("gemma_weight", "weight")]), name


def test_full_tensors_are_the_same_with_an_engine_and_offline(full_names, gemma_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)
    assert len(full_names) == NUM_NORMS
    assert all("norm" in name for name in full_names)
    assert full_tensors(trace_engine(gemma_dir, tp=TP)) == full_names


def test_values_that_the_engine_computes_may_change(engine, full_names, gemma_dir):
    """All else has to be the trainer's or as it was, also in parameters and buffers that no update writes."""
    layouts = engine.call("layouts")
    for version in (1, 2):
        weights = reference.changed(gemma_dir, seed=version)
        begin(engine, weights, full_names)
        assert engine.call("verify_weights", sums_of(layouts, weights)) is None
        engine.call("end_weights", version)
        assert_completes(engine, gemma_dir, weights, version)
    engine.call("randomize_weights")
    begin(engine, weights, full_names)
    assert "model.normalizer" in engine.call("verify_weights", sums_of(layouts, weights))


def test_successive_updates_recompute_derived_values(engine, full_names, gemma_spec, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(gemma_spec.model_path, seed=version)
        engine.call("randomize_weights")
        update(engine, weights, full_names, version)
        now = held(engine, tmp_path / "held")
        for tensors in now:
            assert_recomputed(tensors)
        assert_completes(engine, gemma_spec.model_path, weights, version)
    generations = engine.generate(PROMPTS, temperature=0.0)
    reference.load(gemma_spec.model_path, weights).save_pretrained(tmp_path / "model")
    with started(gemma_spec, model_path=str(tmp_path / "model")) as fresh:
        for here, there in zip(now, held(fresh, tmp_path / "fresh"), strict=True):
            assert here.keys() == there.keys()
            different = {name for name in here if not torch.equal(here[name], there[name])}
            assert different <= {"model.normalizer"}  # a constant that is never read; `randomize_weights` overwrote it
        for here, there in zip(generations, fresh.generate(PROMPTS, temperature=0.0), strict=True):
            assert here.token_ids.tolist() == there.token_ids.tolist()
            assert here.logprobs.tolist() == there.logprobs.tolist()


def test_engine_receives_derived_tensors_in_full_over_the_network(engine, full_names, gemma_dir, tmp_path):
    """Each TP rank receives the boxes of its parameters, and derived tensors in full."""
    world = World(engine, gemma_dir, tmp_path, bucket_bytes=1 << 14, full_tensors=full_names)
    world.connect()
    try:
        for version in (2, 3):
            weights = world.versions.all_of(version)
            engine.call("randomize_weights")
            stats = world.sync(version)
            # boxes that both TP ranks need are sent to their node once
            assert sum(b.bytes_sent for b in stats[:2]) == sum(t.nbytes for t in weights.values())
            assert sum(b.bytes_sent for b in stats) == sum(b.bytes_received for b in stats)
            for tensors in held(engine, tmp_path / "held"):
                assert_recomputed(tensors)
            assert_completes(engine, gemma_dir, weights, version)
    finally:
        world.close()


def test_boxes_of_derived_tensors_are_rejected(engine, full_names, gemma_dir):
    """The engine does not recompute the values for boxes."""
    weights = reference.changed(gemma_dir, seed=9)
    with Senders(engine, [rank_boxes(engine, weights, set(full_names) - {NORM})]) as senders:
        message = rf"{NORM}, which needs load_weights only, got also box \[0:64\]"
        with pytest.raises(WeightSyncError, match=message):
            senders.prepare()


def test_boxes_wait_for_the_tensors_that_come_in_full(engine, full_names, gemma_dir):
    weights = reference.changed(gemma_dir, seed=9)
    update(engine, weights, full_names, 3)
    engine.call("begin_weights")
    with Senders(engine, [rank_boxes(engine, weights, full_names)]) as senders:
        senders.prepare()
        receiving = senders.receive()
        send_bucket(engine, {name: weights[name] for name in full_names if name != NORM})
        assert not receiving.done()
        with pytest.raises(WeightSyncError, match=rf"computes values from 1 tensors, .*: {NORM}|did not arrive"):
            engine.call("end_weights", 9)
        with expect_error(WeightSyncError, "receive_weights", "begin_weights"):
            receiving.result(HANG_SECONDS)
    assert_blocked(engine, 3)
    update(engine, weights, full_names, 3)
    assert_completes(engine, gemma_dir, weights, 3)
