"""Layouts of mixtures of experts against megatron-core's own modules on real ranks: names, shapes, values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.megatron.families.layouts import padded_vocab, trainer_layouts
from megarl.megatron.families.stages import PipelineSplit
from megarl.placement.grid import RankGrid
from megarl.reshard.layout import slices
from tests.megatron.families.modules import parameters_of_ranks
from tests.megatron.families.tiny import CONFIGS, full_parameter, random_tensors, shard, tiny
from tests.megatron.ranks import run_ranks

ONE = {"tp": 1, "pp": 1, "ep": 1, "etp": 1}
CASES = [
    ("qwen3_moe", ONE, 1),
    ("qwen3_moe tied", ONE | {"tp": 2, "ep": 2}, 2),
    ("qwen3_moe", ONE | {"tp": 2, "ep": 2, "etp": 2}, 4),
    ("qwen3_moe tied", ONE | {"pp": 2, "ep": 2}, 4),
    ("qwen3_moe", ONE | {"pp": 2, "last": 1}, 2),
    ("deepseek_v3", ONE, 1),
    ("deepseek_v3 without query latent", ONE | {"tp": 2, "ep": 4}, 4),
    ("deepseek_v3", ONE | {"tp": 2, "ep": 2}, 2),
    ("deepseek_v3", ONE | {"pp": 2, "vpp": 2, "ep": 2}, 4),
]


@pytest.mark.parametrize(("name", "sizes", "world"), CASES, ids=lambda value: str(value).replace("'", ""))
def test_layouts_are_those_of_the_modules(name: str, sizes: dict[str, int], world: int, tmp_path: Path) -> None:
    model, config = tiny(name), CONFIGS[name]
    stage = world // sizes["pp"]
    grid = RankGrid(tp=sizes["tp"], pp=sizes["pp"], dp=stage // sizes["tp"], ep=sizes["ep"], etp=sizes["etp"])
    split = PipelineSplit(chunks=sizes.get("vpp", 1), first=sizes.get("first"), last=sizes.get("last"))
    vocab = padded_vocab(model, grid.tp)
    hf = random_tensors(model)
    built = run_ranks(parameters_of_ranks, world, tmp_path, config, sizes, vocab)
    for rank, layout in enumerate(trainer_layouts(model, grid, "float32", split)):
        at, expert = grid.coordinates(rank), grid.expert_coordinates(rank)
        assert {piece.local for piece in layout.pieces} == set(built[rank])
        for local, shape in built[rank].items():
            full = full_parameter(local, hf, config, vocab)
            of_expert = "local_experts" in local
            index, size = (expert.etp, grid.expert_tp) if of_expert else (at.tp, grid.tp)
            want = shard(full, shape, index, size, halves="linear_fc1" in local)
            got = np.zeros(shape)
            for piece in layout.pieces:
                if piece.local == local:
                    got[slices(piece.local_box)] = hf[piece.tensor][slices(piece.box)]
            assert np.array_equal(got, want), (rank, local)
