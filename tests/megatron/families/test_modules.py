"""Compares planned trainer layouts with those of models built on real ranks: names, boxes, dtypes."""

from __future__ import annotations

import pytest

from megarl.config.trainer import ParallelConfig
from megarl.megatron.families.layout_checks import pipeline_split
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.megatron.requests import ModelSpec
from megarl.placement.rank_grid import RankGrid
from tests.megatron.ranks import run_ranks

CASES = [
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


def gather_layouts(spec):
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import MegatronModel

    model = MegatronModel(spec)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (model.layout, {name: tuple(t.shape) for name, t in model.tensors().items()}))
    return model.architecture, everyone


@pytest.mark.parametrize(("name", "sizes", "world"), CASES, ids=lambda value: str(value).replace("'", ""))
def test_planned_layouts_match_built_models(name, sizes, world, model_folder, tmp_path):
    parallel = ParallelConfig(**sizes)
    spec = ModelSpec(model_path=model_folder(name), dtype="float32", parallel=parallel)
    model, built = run_ranks(gather_layouts, world, tmp_path, spec)
    planned = trainer_layouts(model, RankGrid.of(parallel, world), "float32", pipeline_split(parallel))
    for plan, (layout, shapes) in zip(planned, built, strict=True):
        assert set(plan.pieces) == set(layout.pieces)
        assert plan.tensors == layout.tensors
        assert {piece.local for piece in plan.pieces} == shapes.keys()
