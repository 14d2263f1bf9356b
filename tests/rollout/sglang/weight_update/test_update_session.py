"""Weight updates of a real engine with full tensors."""

import pytest
import torch

from megarl.errors import WeightSyncError
from tests.rollout import reference
from tests.rollout.remote import let_work, requests, send_bucket, sync
from tests.rollout.sglang.serving import PROMPTS, assert_blocked, assert_serves
from tests.time_limits import HANG_SECONDS


def test_successive_syncs_are_bitwise_exact(engine, model_dir, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(model_dir, seed=version)
        engine.call("randomize_weights")
        sync(engine, weights, version, num_buckets=version)
        assert_serves(engine, model_dir, weights, version, tmp_path)


@pytest.fixture
def served(engine, model_dir):
    """Weights that the engine serves as version 5."""
    weights = reference.changed(model_dir, seed=5)
    sync(engine, weights, 5)
    return weights


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
    assert_blocked(engine, 5)
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
    let_work(engine)
    assert not pending.done()
    with pytest.raises(WeightSyncError, match="25 of 25 tensors did not arrive"):
        engine.call("end_weights", 6)
    assert len(pending.result(HANG_SECONDS)) == len(PROMPTS)
    assert_serves(engine, model_dir, served, 5, tmp_path)


def test_requests_during_an_update_wait_for_it(engine, model_dir, served):
    weights = reference.changed(model_dir, seed=9)
    begin = engine.submit("begin_weights")
    along = engine.submit("generate_many", requests(PROMPTS))
    begin.result(HANG_SECONDS)
    early = engine.submit("generate_many", requests(PROMPTS))
    send_bucket(engine, weights)
    end = engine.submit("end_weights", 6)
    late = engine.submit("generate_many", requests(PROMPTS))
    end.result(HANG_SECONDS)
    for pending in (early, late):
        generations = pending.result(HANG_SECONDS)
        assert {v for g in generations for v in g.policy_versions} == {6}
        assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert len(along.result(HANG_SECONDS)) == len(PROMPTS)
