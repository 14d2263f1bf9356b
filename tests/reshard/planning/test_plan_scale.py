"""Planning of DeepSeek-V3 on one rank, and sizes of its layouts, from 2,048 trainer ranks to 1,024 generation ranks."""

import pickle

import pytest

from benchmarks.reshard.published import DEEPSEEK_V3, engine_layouts
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import PipelineSplit, trainer_layouts
from megarl.reshard.analysis.nccl_progress import posted_groups
from megarl.reshard.layout.layout import intersect, volume
from megarl.reshard.layout.lower_bounds import rank_bounds
from megarl.reshard.layout.remote_traffic import MAX_REMOTE_PEERS
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import cached_plan, clear_plan_cache
from megarl.reshard.transfer.bucket import torch_dtype
from tests.reshard.calls import count_calls

GEN_RANKS, GEN_TP, RANKS_OF_A_MACHINE = 1024, 32, 8
BUCKET = 1 << 28


@pytest.fixture(scope="module")
def sources():
    grid = RankGrid(pp=16, tp=8, dp=16, ep=64, etp=1)
    assert grid.size == 2048
    return trainer_layouts(load_architecture(DEEPSEEK_V3, origin="test"), grid, "bfloat16", PipelineSplit(last=1))


@pytest.fixture(scope="module")
def engine(sources):
    return engine_layouts(sources[0].tensors, GEN_TP)


@pytest.fixture(scope="module")
def needs(engine):
    return {rank: engine[rank % GEN_TP] for rank in range(GEN_RANKS)}


@pytest.fixture(scope="module")
def topology(sources):
    return Topology(tuple(rank // RANKS_OF_A_MACHINE for rank in range(len(sources))))


@pytest.fixture(scope="module")
def plan(sources, needs, topology):
    return lambda rank: cached_plan(sources, needs, topology, rank, BUCKET).rounds


@pytest.mark.parametrize("rank", [5, 1500])
def test_planning_takes_few_calls_cold_and_hardly_any_cached(plan, rank):
    """Rank 5 trains and generates; rank 1500 only trains, so it only sends. A million calls take about a second."""
    clear_plan_cache()
    assert count_calls(plan, rank) < 5_000_000
    assert count_calls(plan, rank) < 25_000


def test_received_bytes_equal_the_lower_bound(sources, needs, plan):
    received = sum(message.num_bytes for this in plan(5) for hop in this.hops for message in hop.receives)
    assert received == rank_bounds(sources, needs)[5] == missing_bytes(sources[5], needs[5])


@pytest.mark.parametrize("rank", [5, 1500, pytest.param(700, marks=pytest.mark.slow)])
def test_ranks_post_few_groups_and_messages(plan, rank):
    """One message for each box would be 45,000 received by a rank, and as many relayed."""
    groups = posted_groups(plan(rank))
    assert len(groups) <= 600
    assert sum(len(group.sends) + len(group.receives) for group in groups) <= 20_000


def missing_bytes(held, need):
    """Count missing bytes by brute force; the engine needs one piece of each tensor."""
    size = {name: torch_dtype(spec.dtype).itemsize for name, spec in need.tensors.items()}
    boxes = {piece.tensor: piece.box for piece in need.pieces}
    missing = sum(volume(box) * size[name] for name, box in boxes.items())
    for name, box in {(piece.tensor, piece.box) for piece in held.pieces if piece.tensor in boxes}:
        common = intersect(box, boxes[name])
        missing -= volume(common) * size[name] if common else 0
    return missing


@pytest.mark.parametrize("rank", [5, pytest.param(1023, marks=pytest.mark.slow)])
def test_sends_match_receives(plan, rank):
    """Both ends derive the same messages independently."""
    receiver = plan(rank)
    num_hops = len(receiver[0].hops)
    peers = [sorted({m.source for this in receiver for m in this.hops[hop].receives}) for hop in range(num_hops)]
    first_hop = peers[0]
    sampled = {first_hop[len(first_hop) // 2], first_hop[-1], *(ranks[0] for ranks in peers if ranks)}
    assert max(sampled) >= GEN_RANKS  # a rank that only trains
    assert len(sampled) > 3  # relays of several hops
    for source in sampled:
        sent = [[m.num_bytes for m in hop.sends if m.to == rank] for this in plan(source) for hop in this.hops]
        got = [[m.num_bytes for m in hop.receives if m.source == source] for this in receiver for hop in this.hops]
        assert sent == got
        assert any(got)


@pytest.mark.parametrize("rank", [5, 1500, pytest.param(700, marks=pytest.mark.slow)])
def test_ranks_have_few_peers_on_other_machines(plan, topology, rank):
    """Without limits, each of these ranks would exchange messages with 2,039 others."""
    peers = {send.to for this in plan(rank) for hop in this.hops for send in hop.sends}
    peers |= {message.source for this in plan(rank) for hop in this.hops for message in hop.receives}
    assert sum(not topology.same_node(rank, peer) for peer in peers) <= MAX_REMOTE_PEERS


def test_layouts_take_little_to_send(sources, engine):
    assert sum(len(layout.pieces.to_bytes()) for layout in sources) < 2e6
    assert {len(layout.pieces) for layout in engine} == {45395}
    message = pickle.dumps(engine)
    assert len(message) < 2e6
    received = pickle.loads(message)
    assert received == engine
    assert received[7].pieces[44_000] == engine[7].pieces[44_000]
