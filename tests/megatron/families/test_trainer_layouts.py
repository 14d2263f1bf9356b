"""Trainer layouts: all ranks hold every element of every tensor once per replica; those of built models are equal."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.reshard.published import DEEPSEEK_V3
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.megatron.families import trainer_layouts as planner
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.parameter_map import shard_pieces
from megarl.megatron.families.trainer_layouts import PipelineSplit, pipeline_split, trainer_layouts
from megarl.megatron.requests import ModelSpec
from megarl.reshard.layout.layout import ShardPiece, slices
from tests.errors import expect_error
from tests.megatron.families.tiny import CONFIGS, PLAIN, tiny
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks, sample

MODEL = tiny("qwen3_moe")
NAME = "output_layer.weight"


def test_rank_that_holds_only_padding_has_no_pieces() -> None:
    rows = 128  # 331 rows on 4 ranks of 128: the last one holds nothing but padding
    counts = [list(shard_pieces(NAME, MODEL.parameter_map(NAME), (rows, 48), rank=rank, size=4)) for rank in range(4)]
    assert [len(c) for c in counts] == [1, 1, 1, 0]
    assert counts[2][0].box[0] == (256, 331)
    assert counts[2][0].local_box[0] == (0, 75)


def test_fused_norms_map_to_the_same_tensors_as_separate_norms() -> None:
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        assert MODEL.parameter_map(f"decoder.layers.1.{fused}") == MODEL.parameter_map(f"decoder.layers.1.{plain}")


def test_shards_too_small_for_the_tensor_fail_an_assertion() -> None:
    with expect_error(AssertionError, "331", "2", "165", "shards"):
        list(shard_pieces(NAME, MODEL.parameter_map(NAME), (165, 48), rank=0, size=2))


DENSE_CONFIGS = [
    PLAIN | {"architectures": [f"{name}ForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": heads} | tied
    for name, heads, tied in (
        ("Qwen3", 8, {}),
        ("Qwen2", 8, {"tie_word_embeddings": True}),
        ("Qwen2", 2, {}),
        ("Qwen3", 1, {}),
    )
]
DENSE = [load_architecture(config, origin="test") for config in DENSE_CONFIGS]
"""Fewer key-value heads are shared by tensor-parallel ranks."""

GRIDS = [
    (RankGrid(), PipelineSplit()),
    (RankGrid(tp=2, dp=2, ep=2), PipelineSplit()),
    (RankGrid(tp=4, dp=2, pp=2, ep=8, etp=1), PipelineSplit()),
    (RankGrid(tp=1, cp=2, dp=4, pp=2, ep=2, etp=2), PipelineSplit(num_chunks=2)),
    (RankGrid(tp=2, dp=4, pp=3, ep=4, etp=2), PipelineSplit(last=1, first=1)),
    (RankGrid(tp=2, dp=2, pp=2, ep=4, etp=1), PipelineSplit(last=1)),
]


CASES = [(tiny(name), *grid) for name in CONFIGS for grid in GRIDS]
CASES += [(model, RankGrid(tp=tp, pp=pp), PipelineSplit()) for model in DENSE for tp, pp in ((4, 1), (8, 2))]


@pytest.mark.parametrize(("model", "grid", "split"), CASES, ids=lambda each: getattr(each, "name", str(each)))
def test_every_element_is_held_once_per_replica(model: ModelArchitecture, grid: RankGrid, split: PipelineSplit) -> None:
    layouts = trainer_layouts(model, grid, "float32", split)
    held = {tensor: np.zeros(spec.shape, int) for tensor, spec in layouts[0].tensors.items()}
    assert held.keys() == model.tensors("float32").keys()
    for layout in layouts:
        for piece in layout.pieces:
            held[piece.tensor][slices(piece.box)] += 1
    replicas = grid.cp * grid.dp
    for tensor, count in held.items():
        want = replicas
        if ".mlp.experts." in tensor:
            want = grid.expert_dp
        elif "norm" in tensor or "a_proj" in tensor or ".gate." in tensor:  # not split by tensor ranks
            want = grid.tp * replicas
        elif tensor == "model.embed_tokens.weight" and grid.pp > 1:
            want *= 2 if model.tie_embeddings else 1
        assert (count == want).all(), (tensor, want)


BUILT = [
    ("qwen2", {}, 1),
    ("qwen3", {"tp": 2, "cp": 2}, 4),
    ("gemma2", {"tp": 2, "pp": 2, "vpp": 2}, 4),
    ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}, 2),
    ("qwen3_moe", {"tp": 2, "ep": 2}, 4),
    ("qwen3_moe sparse step", {"pp": 2, "ep": 2}, 4),
    ("mixtral", {"pp": 2, "last_stage_layers": 1}, 2),
    ("deepseek_v3", {}, 1),
    ("deepseek_v3 without query latent", {"tp": 2, "ep": 4, "etp": 1}, 4),
    ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}, 2),
    ("deepseek_v3", {"pp": 2, "vpp": 2, "ep": 2}, 4),
]
DEFAULT_BUILT = [BUILT[2], BUILT[5], BUILT[6], BUILT[8], BUILT[10]]


def gather_layouts(spec: ModelSpec) -> tuple[ModelArchitecture, list[Any]]:
    model = make_model(spec)
    return model.architecture, gather((model.layout, set(model.tensors())))


@pytest.mark.parametrize(("name", "sizes", "world"), sample(BUILT, DEFAULT_BUILT), ids=str)
def test_planned_layouts_are_those_of_built_models(
    name: str, sizes: dict[str, int], world: int, model_folder: Any, tmp_path: Path
) -> None:
    spec = model_spec(model_folder(name), sizes)
    model, built = run_ranks(gather_layouts, world, tmp_path, spec)
    planned = trainer_layouts(model, RankGrid.of(spec.parallel, world), "float32", pipeline_split(spec.parallel))
    for plan, (layout, names) in zip(planned, built, strict=True):
        assert set(plan.pieces) == set(layout.pieces)
        assert plan.tensors == layout.tensors
        assert {piece.local for piece in plan.pieces} == names


@pytest.mark.parametrize("name", CONFIGS)
def test_no_two_parameters_of_a_rank_overlap(name: str) -> None:
    grid = RankGrid(tp=2, dp=2, pp=2, ep=2)
    for layout in trainer_layouts(tiny(name), grid, "float32", PipelineSplit(num_chunks=2)):
        bottoms = Counter((p.local, p.local_box[0], p.local_box[-1]) for p in layout.pieces)
        assert max(bottoms.values()) == 1


def test_ep_that_does_not_divide_the_experts_is_rejected() -> None:
    with expect_error(ConfigError, "Qwen3MoeForCausalLM", "8", "3 = 2"):
        trainer_layouts(tiny("qwen3_moe"), RankGrid(dp=3, ep=3), "float32")


def test_deepseek_v3_on_2048_ranks_is_planned_once_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with the same shards share a layout, and each parameter is cut once for each of its tensor ranks."""
    model, shard_pieces, cut = load_architecture(DEEPSEEK_V3, origin="test"), planner.shard_pieces, Counter()

    def count(name: str, *arguments: Any, rank: int, size: int) -> Iterator[ShardPiece]:
        cut[name] += 1
        return shard_pieces(name, *arguments, rank=rank, size=size)

    monkeypatch.setattr(planner, "shard_pieces", count)
    grid = RankGrid(pp=16, tp=8, dp=16, ep=64, etp=1)
    layouts = trainer_layouts(model, grid, "bfloat16", PipelineSplit(last=1))
    assert (len(layouts), len({id(layout) for layout in layouts})) == (2048, 1024)
    assert len({id(layout.tensors) for layout in layouts}) == 1
    maps = model.parameter_maps()
    assert cut == {name: grid.tp if mapping.expert is None else grid.expert_tp for name, mapping in maps.items()}
    parameters = sum(int(np.prod(spec.shape)) for spec in layouts[0].tensors.values())
    assert parameters == 682_636_487_424  # 671 B, plus the MTP layer, which shares the embeddings
