"""Which parameters the gradient norm counts on a rank, as megatron-core decides it, against the parameter maps.

megatron-core counts a parameter on every tensor-parallel rank if it is marked as sharded, and else on the first rank.
A shard without the mark is left out on the other ranks, so that clipping is too weak; a copy with it counts twice.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.errors import expect_error
from tests.megatron.rank_models import make_model, model_spec
from tests.megatron.ranks import run_ranks

SECOND = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
"""A group of two ranks, on the second of them."""
GROUPS = SimpleNamespace(tp=SECOND, expt_tp=SECOND)


def count_on_second_rank(path, head):
    """Return by parameter whether it is split, and whether the second of two ranks counts it in the gradient norm."""
    model = make_model(model_spec(path, head=head))
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate as is_counted

    found = {}
    for chunk in model.chunks:
        for name, parameter in chunk.module.named_parameters():
            mapping = model.architecture.parameter_map(chunk.global_name(name))
            # copies of an expert's bias are marked by rank, and this one is the first
            is_split = mapping.shard_dim is not None or mapping.expert is not None
            found[name] = is_split, is_counted(parameter, SECOND, SECOND)
    return found


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("qwen2", "lm"),
        ("gemma2", "lm"),
        ("deepseek_v3", "lm"),
        ("qwen3_moe", "value"),
        ("gpt_oss", "lm"),
        ("minimax_m2", "lm"),
        ("qwen3_next", "lm"),
        ("qwen3_5", "lm"),
        ("deepseek_v32", "lm"),
    ],
)
def test_shards_count_on_every_rank_and_copies_on_the_first(name, head, model_folder, value_folder, tmp_path):
    folder = (value_folder if head == "value" else model_folder)(name)
    found = run_ranks(count_on_second_rank, 1, tmp_path, folder, head)
    assert len(found) > 20
    assert {name: counted for name, (_, counted) in found.items()} == {
        name: split for name, (split, _) in found.items()
    }


def mark_experts_of_another_linear(path):
    """Return what the second rank counts of experts whose linears mark nothing, grouped and one by one."""
    model = make_model(model_spec(path))
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate as is_counted

    from megarl.megatron.modeling.gpt_model import ModelChunk, check_shard_marks, mark_experts

    names = ("linear_fc1.weight3", "linear_fc2.weight0", "local_experts.2.linear_fc1.weight")
    parameters = {f"decoder.layers.0.mlp.experts.{name}": torch.nn.Parameter(torch.zeros(4, 2)) for name in names}
    module = SimpleNamespace(named_parameters=parameters.items)
    chunk = ModelChunk(module=module, layers=range(4), first_expert=4)
    before = [is_counted(parameter, SECOND, SECOND) for parameter in parameters.values()]
    mark_experts(chunk, model.architecture, GROUPS)
    check_shard_marks(chunk, model.architecture, GROUPS)
    after = [is_counted(parameter, SECOND, SECOND) for parameter in parameters.values()]
    reduced = [parameter.allreduce for parameter in parameters.values()]
    parameters[f"decoder.layers.0.mlp.experts.{names[0]}"].tensor_model_parallel = False
    with expect_error(AssertionError, "decoder.layers.0.mlp.experts.linear_fc1.weight3"):
        check_shard_marks(chunk, model.architecture, GROUPS)
    norm = {"decoder.layers.0.input_layernorm.weight": torch.nn.Parameter(torch.zeros(4))}
    chunk = ModelChunk(module=SimpleNamespace(named_parameters=norm.items), layers=range(4), first_expert=0)
    check_shard_marks(chunk, model.architecture, GROUPS)
    norm["decoder.layers.0.input_layernorm.weight"].tensor_model_parallel = True
    with expect_error(AssertionError, "input_layernorm.weight", "False", "True"):
        check_shard_marks(chunk, model.architecture, GROUPS)
    return before, after, reduced


def test_experts_are_marked_whatever_their_linears_do(model_folder, tmp_path):
    before, after, reduced = run_ranks(mark_experts_of_another_linear, 1, tmp_path, model_folder("qwen3_moe"))
    assert (before, after, reduced) == ([False] * 3, [True] * 3, [False] * 3)
