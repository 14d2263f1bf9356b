"""What an engine serves: the weights that its ranks hold, and completions as by transformers' model."""

import pytest
import torch

from megarl.errors import WeightSyncError
from tests.engines import reference

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


def assert_completes(engine, model_dir, weights, version=None):
    """Compare completions with those of transformers' model."""
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert version is None or {v for g in generations for v in g.policy_versions} == {version}


def assert_serves(engine, model_dir, weights, version, folder, tp=1):
    """Compare all parameters, completions and the version of an engine."""
    assert_engine_holds(engine, weights, folder, tp)
    assert_completes(engine, model_dir, weights, version)
    assert engine.call("health").policy_version == version


def assert_blocked(engine, version):
    """The engine does not generate after an update that has failed."""
    with pytest.raises(WeightSyncError, match=f"the engine holds parts of version {version} and of an update"):
        engine.generate(PROMPTS)
