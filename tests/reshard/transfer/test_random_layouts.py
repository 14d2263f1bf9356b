"""Random layouts, moved by the real executor between threads over plain gloo and over gloo in NCCL's order."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.nccl_order import NcclOrderTransport
from megarl.reshard.transfer.sink import Parameters
from megarl.reshard.transfer.transport import Transport
from tests.reshard.rank_process import empty_parameters, held_tensors, wrong_elements
from tests.time_limits import UNREACHED_SECONDS

COLUMNS = 8
BUCKET_BYTES = 12_288
TRANSPORTS = {
    "gloo": lambda group: Transport(group, timeout_seconds=UNREACHED_SECONDS, is_exclusive=True, coalesces=False),
    "nccl order": lambda group: NcclOrderTransport(group, timeout_seconds=UNREACHED_SECONDS, is_connected=True),
}


def value(name, sync=0):
    rows = int(name.split(".")[1])
    return torch.rand(rows, COLUMNS, generator=torch.Generator().manual_seed(len(name) * rows + sync))


def split_rows(specs, owners, world, prefix):
    """Return by rank a layout in which each group of `owners[tensor]` divides the tensor's rows, in its order."""
    pieces = [[] for _ in range(world)]
    for name, groups in owners.items():
        rows = specs[name].shape[0]
        for group in groups:
            for part, rank in enumerate(group):
                first, last = rows * part // len(group), rows * (part + 1) // len(group)
                if first < last:
                    local = ((0, last - first), (0, COLUMNS))
                    pieces[rank].append(ShardPiece(name, ((first, last), (0, COLUMNS)), f"{prefix}.{name}", local))
    return [WeightLayout(specs, tuple(of_rank)) for of_rank in pieces]


@st.composite
def layouts(draw):
    """Draw a trainer whose tensors are divided among some of the ranks, engines of some tp, and nodes."""
    world = draw(st.integers(2, 4))
    rows = draw(st.lists(st.integers(1, 40) | st.integers(500, 4000), min_size=1, max_size=4))
    specs = {f"t{i}.{n}": TensorSpec((n, COLUMNS), "float32") for i, n in enumerate(rows)}
    some = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    held = {name: [draw(st.permutations(range(world)) | some)] for name in specs}
    tp = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    engines = [list(range(first, first + tp)) for first in range(0, world, tp)]
    nodes_of_rank = [(0,) * world, tuple(rank * 2 // world for rank in range(world)), tuple(range(world))]
    nodes = draw(st.sampled_from(nodes_of_rank))
    needs = split_rows(specs, dict.fromkeys(specs, engines), world, "gen")
    return split_rows(specs, held, world, "train"), dict(enumerate(needs)), nodes


def connect(transport, size):
    """Return a transport for each rank, between threads of this process."""
    store, never = dist.HashStore(), timedelta(seconds=UNREACHED_SECONDS)
    with ThreadPoolExecutor(size) as pool:
        groups = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, size, never), range(size))
        return [TRANSPORTS[transport](group) for group in groups]


def run_sync(transport, sources, needs, nodes):
    """Run one sync on threads; return by rank the error or the number of wrong elements."""
    connections = connect(transport, len(sources))

    def run(rank):
        plan = cached_plan(sources, needs, Topology(nodes), rank, BUCKET_BYTES)
        held, target = held_tensors(sources[rank], value, 0), empty_parameters(needs[rank])
        executor = BoxExecutor(rank, plan.rounds, plan.buffer_sizes, transport=connections[rank])
        try:
            executor.run(held, Parameters(target))
        except WeightSyncError as error:
            return str(error)
        return wrong_elements(needs[rank], target, value, 0)

    with ThreadPoolExecutor(len(sources)) as pool:
        outcomes = list(pool.map(run, range(len(sources))))
    for connection in connections:
        connection.close()
    return outcomes


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=15)
@given(layouts())
def test_random_layouts_arrive(transport, drawn):
    sources, needs, nodes = drawn
    assert run_sync(transport, sources, needs, nodes) == [0] * len(sources)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_tensor_that_every_rank_needs_from_every_rank(transport):
    """Each rank packs more for the others than its staging holds."""
    world = 4
    specs = {"t0.4096": TensorSpec((4096, COLUMNS), "float32"), "t1.32": TensorSpec((32, COLUMNS), "float32")}
    sources = split_rows(specs, {name: [list(range(world))] for name in specs}, world, "train")
    needs = split_rows(specs, {name: [[rank] for rank in range(world)] for name in specs}, world, "gen")
    assert run_sync(transport, sources, dict(enumerate(needs)), (0,) * world) == [0] * world


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_boxes_pass_several_nodes(transport):
    """One rank holds what six ranks on nodes of their own need: they forward it to each other, in three hops."""
    world, nodes, sizes = 7, tuple(range(7)), [2000, 700, 3, 40, 900]
    specs = {f"t{i}.{rows}": TensorSpec((rows, COLUMNS), "float32") for i, rows in enumerate(sizes)}
    sources = split_rows(specs, {name: [[0]] for name in specs}, world, "train")
    needs = dict(
        enumerate(split_rows(specs, {name: [[rank] for rank in range(1, world)] for name in specs}, world, "gen"))
    )
    plans = [cached_plan(sources, needs, Topology(nodes), rank, BUCKET_BYTES) for rank in range(world)]
    assert {len(plan.rounds[0].hops) for plan in plans} == {3}
    sent = sum(hop.bytes_sent for this in plans[0].rounds for hop in this.hops)
    assert sent == sum(sizes) * COLUMNS * 4  # once, instead of six times
    assert run_sync(transport, sources, needs, nodes) == [0] * world
