"""An engine whose ranks are two groups of data-parallel attention: weights in each rank, completions of both."""

import pytest
import torch

from tests.engines import reference
from tests.engines.remote import started, sync, sync_boxes
from tests.engines.sglang.serving import assert_completes


@pytest.fixture(scope="module")
def engine(spec):
    with started(spec, tp=2, extra_args={"attn_dp_size": 2, "load_balance_method": "round_robin"}) as engine:
        yield engine


def test_both_groups_sample_from_the_weights_of_a_sync(engine, model_dir, tmp_path):
    layouts = engine.call("layouts")
    for version, send in ((1, sync), (2, lambda *arguments: sync_boxes(engine, layouts, *arguments[1:]))):
        weights = reference.changed(model_dir, seed=version)
        engine.call("randomize_weights")
        send(engine, weights, version)
        assert_completes(engine, model_dir, weights, version)
        assert engine.call("health").policy_version == version
    engine.call("read_weights", str(tmp_path))
    held = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"):
        assert all(torch.equal(of_rank[name], weights[name]) for of_rank in held)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(torch.cat([of_rank[name] for of_rank in held], 1), weights[name])
    assert len(engine.call("health").scheduler_pids) == 2


def test_a_lost_rank_ends_the_engine(engine):
    engine.scheduler_processes()[1].kill()
    assert "TP rank 1 was ended by SIGKILL" in str(engine.call("watch"))
