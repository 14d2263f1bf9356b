"""Trainer layouts: together, all ranks hold every element of every tensor once per replica."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from benchmarks.reshard.published import DEEPSEEK_V3
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.pipeline_stages import PipelineSplit
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import slices
from tests.megatron.families.tiny import CONFIGS, tiny

GRIDS = [
    (RankGrid(), PipelineSplit()),
    (RankGrid(tp=2, dp=2, ep=2), PipelineSplit()),
    (RankGrid(tp=4, dp=2, pp=2, ep=8, etp=1), PipelineSplit()),
    (RankGrid(tp=1, cp=2, dp=4, pp=2, ep=2, etp=2), PipelineSplit(num_chunks=2)),
    (RankGrid(tp=2, dp=4, pp=3, ep=4, etp=2), PipelineSplit(last=1, first=1)),
    (RankGrid(tp=2, dp=2, pp=2, ep=4, etp=1), PipelineSplit(last=1)),
]


@pytest.mark.parametrize(("grid", "split"), GRIDS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_element_is_held_once_per_replica(name: str, grid: RankGrid, split: PipelineSplit) -> None:
    model = tiny(name)
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


@pytest.mark.parametrize("name", CONFIGS)
def test_no_two_parameters_of_a_rank_overlap(name: str) -> None:
    grid = RankGrid(tp=2, dp=2, pp=2, ep=2)
    for layout in trainer_layouts(tiny(name), grid, "float32", PipelineSplit(num_chunks=2)):
        bottoms = Counter((p.local, p.local_box[0], p.local_box[-1]) for p in layout.pieces)
        assert max(bottoms.values()) == 1


def test_ep_that_does_not_divide_the_experts_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"experts of Qwen3MoeForCausalLM, got 8 % 3 = 2"):
        trainer_layouts(tiny("qwen3_moe"), RankGrid(dp=3, ep=3), "float32")


def test_deepseek_v3_on_2048_ranks_is_planned_in_seconds() -> None:
    model = load_architecture(DEEPSEEK_V3, origin="test")
    grid = RankGrid(pp=16, tp=8, dp=16, ep=64, etp=1)
    before = time.process_time()
    layouts = trainer_layouts(model, grid, "bfloat16", PipelineSplit(last=1))
    seconds = time.process_time() - before
    distinct = {id(layout): layout for layout in layouts}
    assert (len(layouts), len(distinct)) == (2048, 1024)
    assert len({id(layout.tensors) for layout in layouts}) == 1
    parameters = sum(int(np.prod(spec.shape)) for spec in layouts[0].tensors.values())
    assert parameters == 682_636_487_424  # 671 B, plus the MTP layer, which shares the embeddings
    assert seconds < 5, seconds
