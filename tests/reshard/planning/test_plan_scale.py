"""Planning of DeepSeek-V3 on one rank, from 2,048 trainer ranks to 1,024 generation ranks, within a time limit.

Times are CPU times, the better of two, since the machine may be busy.
"""

import time

import numpy as np
import pytest

from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.pipeline_stages import PipelineSplit
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import PieceTable, WeightLayout, intersect, volume
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.lower_bounds import rank_bounds
from megarl.reshard.planning.plan_cache import cached_plan, clear_plan_cache
from megarl.reshard.transfer.bucket import torch_dtype
from tests.megatron.families.tiny import PUBLISHED_DEEPSEEK_V3

GEN_RANKS, GEN_TP, RANKS_OF_A_MACHINE = 1024, 32, 8
BUCKET = 1 << 28
SLACK = 3
"""Factor by which a core may be slower while others use its hyperthread and memory."""
BY_COLUMNS = ("o_proj", "down_proj")
ON_EVERY_RANK = ("q_a_proj", "kv_a_proj_with_mqa", "gate")


@pytest.fixture(scope="module")
def sources():
    grid = RankGrid(pp=16, tp=8, dp=16, ep=64, etp=1)
    assert grid.size == 2048
    return trainer_layouts(
        load_architecture(PUBLISHED_DEEPSEEK_V3, origin="test"), grid, "bfloat16", PipelineSplit(last=1)
    )


@pytest.fixture(scope="module")
def needs(sources):
    engine = engine_layouts(sources[0].tensors)
    return {rank: engine[rank % GEN_TP] for rank in range(GEN_RANKS)}


@pytest.fixture(scope="module")
def topology(sources):
    return Topology(tuple(rank // RANKS_OF_A_MACHINE for rank in range(len(sources))))


def engine_layouts(specs):
    """Return layouts by tensor rank; norms, routers and down projections into a latent are replicated, not split."""
    names = [name for name in specs if not name.startswith("model.layers.61.")]
    shapes = np.array([(*specs[name].shape, 1)[:2] for name in names])
    dims = np.array([len(specs[name].shape) for name in names], np.int8)
    kinds = [name.split(".")[-2] for name in names]
    whole = np.array([kind in ON_EVERY_RANK for kind in kinds]) | (dims == 1)
    dim = np.array([kind in BY_COLUMNS for kind in kinds]).astype(int)
    rows, every = np.arange(len(names)), np.arange(len(names), dtype=np.int32)
    layouts = []
    for rank in range(GEN_TP):
        part = shapes[rows, dim] // GEN_TP
        boxes = np.stack([np.zeros_like(shapes), shapes], axis=-1)
        boxes[rows, dim] = np.stack([part * rank, part * (rank + 1)], axis=-1)
        boxes[whole] = np.stack([np.zeros_like(shapes), shapes], axis=-1)[whole]
        boxes = boxes.astype(np.int32)
        layouts.append(WeightLayout(specs, PieceTable(names, names, every, every, dims, boxes, boxes - boxes[..., :1])))
    return layouts


@pytest.fixture(scope="module")
def plan(sources, needs, topology):
    return lambda rank: cached_plan(sources, needs, topology, rank, BUCKET).rounds


@pytest.mark.parametrize("rank", [5, 1500])
def test_planning_takes_seconds_cold_and_milliseconds_cached(plan, rank):
    """Rank 5 trains and generates; rank 1500 only trains, so it only sends."""
    cold = []
    for _ in range(2):
        clear_plan_cache()
        cold.append(cpu_seconds(plan, rank))
    assert min(cold) < 2 * SLACK
    assert min(cpu_seconds(plan, rank) for _ in range(5)) < 1e-3 * SLACK


def cpu_seconds(plan, rank):
    start = time.process_time()
    plan(rank)
    return time.process_time() - start


def test_received_bytes_equal_the_lower_bound(sources, needs, plan):
    bounds = rank_bounds(sources, needs)
    for rank in (5, 700):
        received = sum(message.num_bytes for this in plan(rank) for hop in this.hops for message in hop.receives)
        assert received == bounds[rank] == missing_bytes(sources[rank], needs[rank])


def missing_bytes(held, need):
    """Count missing bytes by brute force; the engine needs one piece of each tensor."""
    size = {name: torch_dtype(spec.dtype).itemsize for name, spec in need.tensors.items()}
    boxes = {piece.tensor: piece.box for piece in need.pieces}
    missing = sum(volume(box) * size[name] for name, box in boxes.items())
    for name, box in {(piece.tensor, piece.box) for piece in held.pieces if piece.tensor in boxes}:
        common = intersect(box, boxes[name])
        missing -= volume(common) * size[name] if common else 0
    return missing


def test_sends_match_receives(plan):
    """Both ends derive the same messages independently."""
    for rank in (5, 1023):
        receiver = plan(rank)
        peers = [sorted({m.source for this in receiver for m in this.hops[hop].receives}) for hop in (0, 1)]
        first_hop, second_hop = peers
        sampled = {first_hop[0], first_hop[len(first_hop) // 2], first_hop[-1], second_hop[0]}
        assert max(sampled) >= GEN_RANKS  # a rank that only trains
        for source in sampled:
            sent = [[m.num_bytes for m in hop.sends if m.to == rank] for this in plan(source) for hop in this.hops]
            got = [[m.num_bytes for m in hop.receives if m.source == source] for this in receiver for hop in this.hops]
            assert sent == got
            assert any(got)
