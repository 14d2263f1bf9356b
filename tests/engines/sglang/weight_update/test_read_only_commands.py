"""Commands that write nothing, in a real engine whose scheduler counts what SGLang does with the weights."""

import os
from functools import partial
from pathlib import Path

import pytest

from megarl.errors import WeightSyncError
from tests.engines import reference
from tests.engines.remote import (
    RemoteEngine,
    Senders,
    begin_and_load,
    boxes_of,
    send_rounds,
    started,
    sums_of,
    sync,
    sync_boxes,
)
from tests.engines.sglang.serving import PROMPTS, assert_blocked, assert_completes
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS

PLUGIN = """
import os
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

embeddings = []
initialize = RotaryEmbedding.__init__

def keep(self, *args, **options):
    initialize(self, *args, **options)
    embeddings.append(self)

RotaryEmbedding.__init__ = keep

def alter_angles(how):
    for embedding in embeddings:
        if how == "append":
            embedding._ensure_cos_sin_cache_length(len(embedding.cos_sin_cache))
        elif how:
            embedding.cos_sin_cache[1] *= 2 if how == "double" else 0.5

def count(call, name):
    def counted(self, layer):
        if os.path.exists(os.environ["MEGARL_TEST_ANGLES"]):
            with open(os.environ["MEGARL_TEST_ANGLES"]) as file:
                alter_angles(file.read())
            os.remove(os.environ["MEGARL_TEST_ANGLES"])
        with open(os.environ["MEGARL_TEST_CALLS"], "a") as file:
            print(name, file=file)
        return call(self, layer)
    return counted

for name in ("process_weights_after_loading", "restore_weights_before_loading"):
    setattr(UnquantizedLinearMethod, name, count(getattr(UnquantizedLinearMethod, name), name))
    if os.environ["MEGARL_TEST_REPACKS"]:
        setattr(UnquantizedEmbeddingMethod, name, lambda self, layer: None)
"""


class CountingEngine(RemoteEngine):
    """An engine whose scheduler imports `PLUGIN` with the models of an external package."""

    def __init__(self, spec, *, folder, repacks):
        package = folder / "counting_models"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "count.py").write_text(PLUGIN)
        self.calls = folder / "calls"
        self.calls.touch()
        self.angles = folder / "angles"
        """What happens to the cached angles of RoPE in the next update: append, double or halve."""
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": package.name,
            "MEGARL_TEST_CALLS": str(self.calls),
            "MEGARL_TEST_ANGLES": str(self.angles),
            "MEGARL_TEST_REPACKS": "1" if repacks else "",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            super().__init__(spec)

    def count(self):
        """Return the calls of both methods since the last count, in all modules of the model."""
        lines = self.calls.read_text().splitlines()
        self.calls.write_text("")
        return {name: lines.count(name) for name in set(lines)}


@pytest.fixture(scope="module")
def engine(spec, tmp_path_factory):
    with started(spec, partial(CountingEngine, folder=tmp_path_factory.mktemp("plain"), repacks=False)) as engine:
        engine.calls_at_start = engine.count()
        yield engine


@pytest.fixture(scope="module")
def repacking_engine(spec, tmp_path_factory):
    with started(spec, partial(CountingEngine, folder=tmp_path_factory.mktemp("repacking"), repacks=True)) as engine:
        yield engine


NUM_LINEAR = 8
"""Linear modules of the model: qkv_proj, o_proj, gate_up_proj and down_proj of two layers."""
ONE_UPDATE = {"process_weights_after_loading": NUM_LINEAR, "restore_weights_before_loading": NUM_LINEAR}


def test_reading_does_not_process_weights(engine, model_dir, tmp_path):
    assert engine.calls_at_start == {"process_weights_after_loading": NUM_LINEAR}
    engine.count()
    layouts = engine.call("layouts")
    engine.call("weight_needs")
    engine.call("read_weights", str(tmp_path))
    with Senders(engine, [[boxes_of(layouts[0], reference.changed(model_dir, seed=1))]]) as senders:
        senders.prepare()
    assert engine.count() == {}
    assert len(engine.generate(PROMPTS)) == len(PROMPTS)


def test_an_update_processes_weights_once_also_if_they_are_read_meanwhile(engine, model_dir, tmp_path):
    (layout,) = engine.call("layouts")
    engine.count()
    weights = reference.changed(model_dir, seed=1)
    engine.call("begin_weights")
    send_rounds(engine, [[boxes_of(layout, weights)]])
    engine.call("read_weights", str(tmp_path))
    engine.call("end_weights", 1)
    assert engine.count() == ONE_UPDATE


def test_changed_buffers_that_no_update_writes_are_found(engine, model_dir):
    """SGLang appends to its angles of RoPE if sequences are longer than the cache, which changes no angle before."""
    layouts, weights = engine.call("layouts"), reference.changed(model_dir, seed=4)

    def update(version, angles):
        engine.angles.write_text(angles)
        begin_and_load(engine, weights)
        problem = engine.call("verify_weights", sums_of(layouts, weights))
        if problem is None:
            engine.call("end_weights", version)
        return problem

    assert update(4, "append") is None
    problem = update(5, "double")
    assert problem.startswith("TP rank 0 has other values than at its start of what no update writes: ")
    assert problem.endswith(".cos_sin_cache")
    assert_blocked(engine, 4)
    assert update(5, "halve") is None
    assert_completes(engine, model_dir, weights)


def mapped_buckets(process):
    """Return the inodes of the buckets that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if "megarl-weights" in line]


def receive_all(engine, senders, version):
    """Run a complete update; return what the engine has mapped before its last round, and at the end of the update."""
    (process,) = engine.scheduler_processes()
    engine.call("begin_weights")
    receiving = senders.receive()
    senders.complete(0)
    first = mapped_buckets(process)
    senders.complete(1)
    last = mapped_buckets(process)
    receiving.result(HANG_SECONDS)
    engine.call("end_weights", version)
    return first, last


def test_buckets_stay_mapped_until_they_are_replaced_or_an_update_fails(engine, model_dir):
    (process,), (layout,) = engine.scheduler_processes(), engine.call("layouts")
    boxes = boxes_of(layout, reference.changed(model_dir, seed=3))
    with Senders(engine, [[boxes[::2]], [boxes[1::2]]]) as senders:
        senders.prepare()
        assert mapped_buckets(process) == []
        first, last = receive_all(engine, senders, 3)
        assert set(first) < set(last)
        assert len(last) == 2
        assert receive_all(engine, senders, 4) == (last, last)  # the same buckets again
        senders.replace_buffers()
        during, new = receive_all(engine, senders, 5)
        assert len(during) == 3  # the two that are still mapped, and a new one
        assert len(new) == 2
        assert not set(new) & set(last)
        engine.call("begin_weights")
        receiving = senders.receive()
        senders.complete(0)
        senders.ranks[0].close()
        with expect_error(WeightSyncError, "aborted"):
            receiving.result(HANG_SECONDS)
        assert mapped_buckets(process) == []
    weights = reference.changed(model_dir, seed=3)
    sync(engine, weights, 6)
    sync_boxes(engine, [layout], weights, 7)
    assert len(mapped_buckets(process)) == 3
    with Senders(engine, [[boxes]]) as others:
        others.prepare()
        assert mapped_buckets(process) == []
    sync(engine, weights, 8)
    assert_completes(engine, model_dir, weights)


def test_repacked_weights_cannot_be_written_as_boxes(repacking_engine):
    modules = r"model.embed_tokens \(UnquantizedEmbeddingMethod\)"
    with pytest.raises(WeightSyncError, match=rf"SGLang repacks the weights of 2 modules.*{modules}.*gather_hf"):
        repacking_engine.call("layouts")


def test_repacked_weights_count_as_mixed_after_any_failed_update(repacking_engine, model_dir):
    """Nothing was written, but the weights were unpacked and packed again."""
    engine = repacking_engine
    sync(engine, reference.changed(model_dir, seed=1), 1)
    assert len(engine.generate(PROMPTS)) == len(PROMPTS)
    engine.call("begin_weights")
    with expect_error(WeightSyncError, "25", "tensors", "arrive"):
        engine.call("end_weights", 2)
    assert_blocked(engine, 1)
    weights = reference.changed(model_dir, seed=2)
    sync(engine, weights, 2)
    assert_completes(engine, model_dir, weights)
