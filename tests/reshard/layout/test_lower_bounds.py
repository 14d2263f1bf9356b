"""The least seconds of a sync, against sets of single elements, and by hand."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.layout.lower_bounds import NeedIndex, seconds_bound
from megarl.reshard.layout.topology import LinkRates, Topology
from tests.reshard import synthetic
from tests.reshard.planning.test_plan import BYTES, worlds


def elements(layouts):
    """Return {(tensor, row, column)} of all pieces."""
    found = set()
    for layout in layouts:
        for piece in layout.pieces:
            (top, bottom), (left, right) = piece.box
            found |= {(piece.tensor, row, column) for row in range(top, bottom) for column in range(left, right)}
    return found


def bound_by_sets(sources, needs, nodes, network, nvlink, nics):
    """Return the bound, from sets of elements."""
    specs = sources[0].tensors

    def size(of):
        return sum(BYTES[specs[name].dtype] for name, _, _ in of)

    held = [elements([layout]) for layout in sources]
    needed = [elements([needs[rank]]) if rank in needs else set() for rank in range(len(sources))]
    machines = sorted(set(nodes))
    times = [0.0]
    for machine in machines:
        inside = [rank for rank in range(len(sources)) if nodes[rank] == machine]
        outside = [rank for rank in range(len(sources)) if nodes[rank] != machine]
        held_inside = set().union(*(held[rank] for rank in inside))
        held_outside = set().union(*(held[rank] for rank in outside))
        enters = set().union(*(needed[rank] for rank in inside)) - held_inside
        leaves = (set().union(*(needed[rank] for rank in outside)) & held_inside) - held_outside
        num_nics = nics or len(inside)
        times += [size(enters) / (num_nics * network), size(leaves) / (num_nics * network)]
        of_rank = network * max(1, num_nics / len(inside))
        times += [size(needed[rank] - held[rank]) / (nvlink + of_rank) for rank in inside]
        times += [size((needed[rank] & held_inside) - held[rank]) / nvlink for rank in inside]
    return max(times)


@given(
    worlds(),
    st.sampled_from([1.0, 3.0]),
    st.sampled_from([0.5, 2.0, 100.0]),
    st.sampled_from([None, 1, 2, 8]),
    st.booleans(),
)
@settings(max_examples=150)
def test_bound_equals_that_of_sets_of_elements(case, network, nvlink, nics, some):
    sources, needs, topology = case
    if some:  # ranks without an engine rank
        needs = {rank: need for rank, need in needs.items() if rank % 2 == 0}
    rates = LinkRates(network=network, nvlink=nvlink, nics_per_machine=nics)
    expected = bound_by_sets(sources, needs, topology.nodes, network, nvlink, nics)
    assert seconds_bound(sources, needs, topology, rates) == pytest.approx(expected)


def whole_layout(num_bytes):
    tensors = {"t": TensorSpec((num_bytes // 4, 1), "float32")}
    box = ((0, num_bytes // 4), (0, 1))
    return WeightLayout(tensors, ()), WeightLayout(tensors, (ShardPiece("t", box, "t", box),))


def test_one_holder_sends_to_two_machines_once_and_each_receives_once():
    """400 bytes over one NIC of 4 B/s; machines forward them, so that the holder sends them once."""
    nothing, whole = whole_layout(400)
    rates = LinkRates(network=4.0, nvlink=1000.0)
    needs = {1: whole, 2: whole}
    assert seconds_bound([whole, nothing, nothing], needs, Topology((0, 1, 2)), rates) == 100
    # two ranks on one machine take in half each, over a NIC each, and exchange the halves
    assert seconds_bound([whole, whole, nothing, nothing], {2: whole, 3: whole}, Topology((0, 0, 1, 1)), rates) == 50
    # both have four NICs then
    many = LinkRates(network=4.0, nvlink=1000.0, nics_per_machine=4)
    assert seconds_bound([whole, nothing], {1: whole}, Topology((0, 1)), many) == 25


def test_the_machine_that_alone_holds_a_tensor_sends_it():
    """Two machines of four ranks need what one rank of a machine of one holds: its NIC is the bottleneck."""
    nothing, whole = whole_layout(400)
    nodes = Topology((0, 1, 1, 1, 1, 2, 2, 2, 2))
    needs = dict.fromkeys(range(1, 9), whole)
    rates = LinkRates(network=4.0, nvlink=1e9)
    assert seconds_bound([whole, *[nothing] * 8], needs, nodes, rates) == 100
    twice = [whole, *[nothing] * 7, whole]  # the third machine holds it too
    assert seconds_bound(twice, needs, nodes, rates) == 25


def test_one_machine_is_bound_by_nvlink():
    case = synthetic.scenario(1, 4, 1, 1)
    needs = dict.fromkeys(range(4), case.engine[0])
    bound = seconds_bound(case.sources, needs, case.topology, LinkRates(network=1.0, nvlink=10.0))
    assert bound == synthetic.MODEL_BYTES * 0.75 / 10


def boxes_layout(*boxes):
    locals_ = [tuple((0, stop - start) for start, stop in box) for box in boxes]
    pieces = [ShardPiece("t", box, f"t{i}", local) for i, (box, local) in enumerate(zip(boxes, locals_, strict=True))]
    return WeightLayout({"t": TensorSpec((6, 9, 10), "float32")}, tuple(pieces))


def test_missing_bytes_of_boxes_that_overlap_in_part():
    boxes, holes = (
        [((0, 5), (2, 7), (1, 3)), ((2, 6), (0, 9), (2, 4))],
        [((1, 3), (0, 4), (2, 9)), ((5, 6), (1, 2), (0, 9))],
    )
    need, held = boxes_layout(*boxes), boxes_layout(*holes)
    found = NeedIndex([need]).missing([held], [need])
    masks = []
    for box in boxes:
        masks.append(np.zeros((6, 9, 10), bool))
        masks[-1][slices(box)] = True
        for hole in holes:
            masks[-1][slices(hole)] = False
    assert found.boxes == 4 * sum(mask.sum() for mask in masks)
    assert found.elements == 4 * (masks[0] | masks[1]).sum() < found.boxes


def test_bound_needs_no_torch():
    code = "import sys, megarl.reshard.layout.lower_bounds; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
