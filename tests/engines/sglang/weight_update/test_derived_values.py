"""Updates of a model whose engine computes values from its weights: Gemma 2 keeps 1 + w for every norm."""

import dataclasses
import os

import pytest
import torch
from transformers import Gemma2Config

from megarl.engines.sglang.weight_layout.engine_trace import read_traces
from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
from megarl.engines.sglang.weight_update.update_session import full_tensors
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import full_local
from megarl.reshard.planning.strategy import DeltaUpdate
from tests.engines import reference
from tests.engines.conftest import SIZES, save_tiny
from tests.engines.remote import Senders, boxes_of, fork_traces, send_rounds, started, sums_of
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


PLUGIN = """
import os

from sglang.srt.models.gemma2 import Gemma2ForCausalLM
from sglang.srt.runtime_context import get_parallel

def post_load_weights(self):
    if get_parallel().tp_rank == 1 and os.path.exists(os.environ["MEGARL_TEST_FAULT"]):
        raise RuntimeError("cannot complete the model")

Gemma2ForCausalLM.post_load_weights = post_load_weights
"""
"""Module that the schedulers import with the models of an external package."""


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """A file: while it exists, the second TP rank cannot complete the model after it has received all boxes."""
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def engine(gemma_spec, fault):
    package = fault.parent / "failing_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(fault.parent), prepend=os.pathsep)
        patch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", package.name)
        patch.setenv("MEGARL_TEST_FAULT", str(fault))
        with started(gemma_spec) as engine:
            yield engine


@pytest.fixture(scope="module")
def needs(engine):
    return engine.call("weight_needs")


def rank_boxes(layouts, weights, without=()):
    return [boxes_of(layout, weights, without) for layout in layouts]


def begin(engine, weights, needs):
    """Send all boxes in two rounds."""
    boxes = rank_boxes(needs.received(), weights)
    engine.call("begin_weights")
    send_rounds(engine, [[boxes_of_rank[part::2] for boxes_of_rank in boxes] for part in range(2)])


def update(engine, weights, needs, version):
    begin(engine, weights, needs)
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


def test_full_tensors_are_the_same_with_an_engine_and_offline(needs, gemma_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)
    assert len(needs.full_tensors) == NUM_NORMS
    assert all("norm" in name for name in needs.full_tensors)
    assert trace_layouts(gemma_dir, tp=TP) == list(needs.layouts)
    (cached,) = (tmp_path / "megarl" / "layouts").iterdir()
    assert full_tensors(read_traces(cached)) == needs.full_tensors


def test_values_that_the_engine_computes_may_change(engine, needs, gemma_dir):
    """All else has to be the trainer's or as it was, also in parameters and buffers that no update writes."""
    for version in (1, 2):
        weights = reference.changed(gemma_dir, seed=version)
        begin(engine, weights, needs)
        assert engine.call("verify_weights", sums_of(needs.layouts, weights)) is None
        engine.call("end_weights", version)
        assert_completes(engine, gemma_dir, weights, version)
    engine.call("randomize_weights")
    begin(engine, weights, needs)
    assert "model.normalizer" in engine.call("verify_weights", sums_of(needs.layouts, weights))


def test_successive_updates_recompute_derived_values(engine, needs, gemma_spec, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(gemma_spec.model_path, seed=version)
        engine.call("randomize_weights")
        update(engine, weights, needs, version)
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


def test_rank_that_cannot_complete_the_model_blocks_the_engine_and_nobody_else(engine, needs, gemma_dir, fault):
    """All ranks have received all boxes, so that the trainer ranks are free; the other TP rank does not wait."""
    update(engine, reference.changed(gemma_dir, seed=1), needs, 1)
    weights = reference.changed(gemma_dir, seed=2)
    fault.touch()
    try:
        engine.call("begin_weights")
        with Senders(engine, [rank_boxes(needs.received(), weights)]) as senders:
            senders.prepare()
            receiving = senders.receive()
            senders.send_all()
            with pytest.raises(WeightSyncError, match=r"^TP rank 1: RuntimeError: cannot complete the model$"):
                receiving.result(HANG_SECONDS)
            assert senders.failures == [""] * TP
        assert_blocked(engine, 1)
    finally:
        fault.unlink()
    update(engine, weights, needs, 2)
    assert_completes(engine, gemma_dir, weights, 2)


def test_rank_that_cannot_complete_the_model_ends_a_sync_over_the_network(engine, gemma_dir, fault, tmp_path):
    world = World(engine, gemma_dir, tmp_path, bucket_bytes=1 << 14)
    world.connect()
    try:
        world.sync(1)
        fault.touch()
        receiving = world.begin(2)
        assert [trainer.result().error for trainer in world.trainers] == [None, None]
        with pytest.raises(WeightSyncError, match=r"^TP rank 1: RuntimeError: cannot complete the model$"):
            receiving.result(HANG_SECONDS)
        assert_blocked(engine, 1)
        fault.unlink()
        world.connect()
        world.sync(3)
        assert_completes(engine, gemma_dir, world.versions.all_of(3), 3)
    finally:
        fault.unlink(missing_ok=True)
        world.close()


def test_engine_receives_derived_tensors_in_full_over_the_network(engine, gemma_dir, tmp_path):
    """Each TP rank receives the boxes of its parameters, and derived tensors in full."""
    world = World(engine, gemma_dir, tmp_path, bucket_bytes=1 << 14)
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


def test_delta_syncs_change_derived_values(engine, gemma_dir, tmp_path):
    """A tensor that came in full keeps its values, to which changed elements are written."""
    world = World(engine, gemma_dir, tmp_path, bucket_bytes=1 << 14)
    world.connect()
    try:
        for version, delta in ((2, DeltaUpdate(number=1)), (3, DeltaUpdate(number=2, base=1))):
            world.sync(version, delta)
            for tensors in held(engine, tmp_path / "held"):
                assert_recomputed(tensors)
            assert_completes(engine, gemma_dir, world.versions.all_of(version), version)
    finally:
        world.close()


def test_boxes_of_derived_tensors_are_rejected(engine, needs, gemma_dir):
    """The engine does not recompute the values for boxes."""
    weights = reference.changed(gemma_dir, seed=9)
    with Senders(engine, [rank_boxes(needs.layouts, weights, set(needs.full_tensors) - {NORM})]) as senders:
        message = rf"{NORM}, which needs to come in full, got box \[0:64\]"
        with pytest.raises(WeightSyncError, match=message):
            senders.prepare()


@pytest.mark.parametrize("part", [0, 60])
def test_tensors_that_do_not_come_in_full_are_rejected_before_an_update(engine, needs, gemma_dir, part):
    weights = reference.changed(gemma_dir, seed=9)
    update(engine, weights, needs, 3)
    boxes = rank_boxes(needs.received(), weights, [NORM])
    if part:
        for of_rank in boxes:
            of_rank.append((full_local(NORM), ((0, part),), weights[NORM][:part]))
    expected = ("full tensor", NORM, "[60:64]" if part else "[0:64]")
    with Senders(engine, [boxes]) as senders, expect_error(WeightSyncError, *expected):
        senders.prepare()
    assert_completes(engine, gemma_dir, weights, 3)
