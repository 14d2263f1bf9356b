"""Weight updates of a real engine with full tensors."""

import time

import pytest
import torch

from megarl.errors import WeightSyncError
from tests.rollout import reference
from tests.rollout.remote import requests, send_bucket, sync

PROMPTS = [[(11 * i + 5 * j) % 240 for j in range(6 + 3 * i)] for i in range(5)]


HEAD_DIM, VOCABULARY_MULTIPLE = 32, 64


def engine_parameters(weights, tp, rank):
    """Return the expected parameters of an engine rank: stacked projections, sharded over the ranks.

    On CPU, SGLang adds heads of zeros if the key-value heads cannot be divided evenly.
    """

    def padded(t, dim, multiple):
        shape = list(t.shape)
        shape[dim] = -shape[dim] % multiple
        return torch.cat([t, t.new_zeros(shape)], dim)

    def share(t, dim, multiple=1):
        return padded(t, dim, multiple).chunk(tp, dim)[rank]

    num_kv_heads = len(weights["model.layers.0.self_attn.k_proj.weight"]) // HEAD_DIM
    queries = len(weights["model.layers.0.self_attn.q_proj.weight"]) // num_kv_heads * tp

    expected = {}
    for name, t in weights.items():
        if name.endswith("q_proj.weight"):
            k, v = (share(weights[name.replace("q_proj", f"{x}_proj")], 0, HEAD_DIM * tp) for x in "kv")
            expected[name.replace("q_proj", "qkv_proj")] = torch.cat([share(t, 0, queries), k, v])
        elif name.endswith("gate_proj.weight"):
            parts = [t, weights[name.replace("gate_proj", "up_proj")]]
            expected[name.replace("gate_proj", "gate_up_proj")] = torch.cat([share(p, 0) for p in parts])
        elif name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            continue
        elif name.endswith("o_proj.weight"):
            expected[name] = share(t, 1, queries)
        elif name.endswith("down_proj.weight"):
            expected[name] = share(t, 1)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            expected[name] = share(t, 0, VOCABULARY_MULTIPLE)
        else:
            expected[name] = t
    return expected


def assert_engine_holds(engine, weights, folder, tp=1):
    engine.call("read_weights", str(folder))
    for rank in range(tp):
        held = torch.load(folder / f"rank{rank}.pt")
        expected = engine_parameters(weights, tp, rank)
        assert held.keys() == expected.keys()
        for name, t in expected.items():
            assert torch.equal(held[name], t), f"{name} of rank {rank}"


def test_successive_syncs_are_bitwise_exact(engine, model_dir, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(model_dir, seed=version)
        engine.call("randomize_weights")
        sync(engine, weights, version, num_buckets=version)
        assert_engine_holds(engine, weights, tmp_path)
        generations = engine.generate(PROMPTS)
        assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
        assert {v for g in generations for v in g.policy_versions} == {version}


def test_update_flushes_the_prefix_cache(engine, model_dir):
    """The same prompt is used again after its keys and values were cached under other weights."""
    sync(engine, reference.changed(model_dir, seed=1), 1)
    engine.generate(PROMPTS)
    weights = reference.changed(model_dir, seed=2)
    sync(engine, weights, 2)
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4


@pytest.fixture
def served(engine, model_dir):
    """Weights that the engine serves as version 5."""
    weights = reference.changed(model_dir, seed=5)
    sync(engine, weights, 5)
    return weights


def assert_serves(engine, model_dir, weights, version, folder):
    assert_engine_holds(engine, weights, folder)
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert {v for g in generations for v in g.policy_versions} == {version}
    assert engine.call("health").policy_version == version


BAD_TENSORS = {
    "unknown name": ("model.layers.7.mlp.up_proj.weight", torch.zeros(128, 64), "is no tensor of the model"),
    "engine's own name": ("model.layers.0.mlp.gate_up_proj.weight", torch.zeros(256, 64), "is no tensor of the model"),
    "wrong shape": ("model.norm.weight", torch.zeros(63), r"model.norm.weight needs shape \[64\], got \[63\]"),
    "wrong dtype": ("model.norm.weight", torch.zeros(64).half(), "needs dtype float32, got float16"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_invalid_bucket_changes_nothing(engine, model_dir, served, tmp_path, case):
    name, tensor, message = BAD_TENSORS[case]
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match=message):
        send_bucket(engine, {"lm_head.weight": torch.zeros(256, 64), name: tensor})
    assert_serves(engine, model_dir, served, 5, tmp_path)


def test_missing_tensor_is_reported_and_blocks_the_engine_until_a_complete_update(engine, model_dir, served, tmp_path):
    weights = reference.changed(model_dir, seed=6)
    partial = {name: t for name, t in weights.items() if name != "model.layers.1.self_attn.k_norm.weight"}
    with pytest.raises(WeightSyncError, match=r"1 of 25 tensors did not arrive for version 6: .*1\.self_attn\.k_norm"):
        sync(engine, partial, 6)
    assert engine.call("health").policy_version == 5
    with pytest.raises(WeightSyncError, match="parts of version 5"):
        engine.generate(PROMPTS)
    sync(engine, weights, 6)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


def test_empty_update_is_rejected_and_the_old_weights_are_served(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match="25 of 25 tensors did not arrive"):
        engine.call("end_weights", 6)
    assert_serves(engine, model_dir, served, 5, tmp_path)


def test_update_needs_begin_weights(engine, served):
    with pytest.raises(WeightSyncError, match="needs begin_weights first"):
        send_bucket(engine, {"model.norm.weight": torch.zeros(64)})
    with pytest.raises(WeightSyncError, match="needs begin_weights first"):
        engine.call("end_weights", 6)


def test_abandoned_update_can_be_restarted(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    send_bucket(engine, {"model.norm.weight": torch.zeros(64)})
    weights = reference.changed(model_dir, seed=7)
    sync(engine, weights, 7)
    assert_serves(engine, model_dir, weights, 7, tmp_path)


def test_failed_update_that_wrote_nothing_resumes_requests_in_flight(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    pending = engine.submit("generate_many", requests(PROMPTS))
    time.sleep(0.1)
    assert not pending.done()
    with pytest.raises(WeightSyncError, match="25 of 25 tensors did not arrive"):
        engine.call("end_weights", 6)
    assert len(pending.result(30)) == len(PROMPTS)
    assert_serves(engine, model_dir, served, 5, tmp_path)


def test_requests_during_an_update_wait_for_it(engine, model_dir, served):
    weights = reference.changed(model_dir, seed=9)
    begin = engine.submit("begin_weights")
    along = engine.submit("generate_many", requests(PROMPTS))
    begin.result(30)
    early = engine.submit("generate_many", requests(PROMPTS))
    send_bucket(engine, weights)
    end = engine.submit("end_weights", 6)
    late = engine.submit("generate_many", requests(PROMPTS))
    end.result(30)
    for pending in (early, late):
        generations = pending.result(30)
        assert {v for g in generations for v in g.policy_versions} == {6}
        assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert len(along.result(30)) == len(PROMPTS)
