"""The baselines that gather the full model, against HybridFlow's table 2 (arXiv 2409.19256)."""

import numpy as np
import pytest

from benchmarks.reshard.full_gather import FULL_GATHERS, FullGather, owned_parts
from megarl.reshard.analysis.forecast import redundant_bytes
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from tests.reshard.synthetic import MODEL_BYTES, scenario

TABLE = {  # p-t-d -> 1-t_g: fractions of the model that every rank receives, and then holds in excess
    (1, 4, 2, 2): {"ds_chat": (0.875, 1 / 8), "hybridflow_v": (0.750, 1 / 4)},
    (1, 8, 2, 4): {"ds_chat": (0.9375, 1 / 16), "hybridflow_v": (0.875, 1 / 8)},
    (8, 8, 2, 8): {"hybridflow_v": (0.984375, 0)},
}


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout, row in TABLE.items() for name in row], ids=str)
def test_received_and_redundant_bytes_are_those_of_the_paper(layout, name):
    case = FullGather(name, scenario(*layout))
    received, redundant = TABLE[layout][name]
    planned = case.forecast()
    assert {of_rank.bytes_received for of_rank in planned.stats} == {received * MODEL_BYTES}
    assert redundant_bytes(case.arrangement, case.gather_scenario.sources) == redundant * MODEL_BYTES
    assert planned.stalls == ()


@pytest.mark.parametrize("name", FULL_GATHERS)
def test_peak_memory_includes_the_full_model(name):
    planned = FullGather(name, scenario(1, 3, 2, 4, bucket_bytes=8192)).forecast()  # an engine on four of six ranks
    for rank, of_rank in enumerate(planned.stats):
        assert MODEL_BYTES < of_rank.peak_extra_bytes <= MODEL_BYTES + 2 * 8192
        assert of_rank.bytes_delivered == (MODEL_BYTES / 4 if rank < 4 else 0)


def test_bytes_between_nodes():
    """Two nodes with a training replica each: with ds_chat, half of the model is owned by the other node."""
    case = scenario(1, 4, 2, 2, nodes=2)
    into = {name: FullGather(name, case).forecast().traffic(case.topology).into_nodes for name in FULL_GATHERS}
    assert into == {"ds_chat": dict.fromkeys((0, 1), 4 * MODEL_BYTES / 2), "hybridflow_v": {0: 0, 1: 0}}


def test_hybridflow_v_stays_in_its_training_replica():
    case = scenario(2, 2, 2, 2)
    between = FullGather("hybridflow_v", case).forecast().bytes_between
    replica = [case.grid.coordinates(rank).dp for rank in range(8)]
    assert between
    assert all(replica[source] == replica[destination] for source, destination in between)


@pytest.mark.parametrize(("rows", "holders"), [(5, 3), (2, 4), (12, 4), (1, 1)])
def test_owned_rows_have_no_gap_or_overlap(rows, holders):
    tensors = {"w": TensorSpec((rows + 2, 3), "float32")}
    held = ShardPiece("w", ((2, rows + 2), (0, 3)), "local", ((7, rows + 7), (1, 4)))
    owned = owned_parts([WeightLayout(tensors, (held,))] * holders)
    seen = np.zeros((rows + 2, 3), int)
    for layout in owned:
        for piece in layout.pieces:
            seen[slices(piece.box)] += 1
            assert piece.local_box == ((piece.box[0][0] + 5, piece.box[0][1] + 5), (1, 4))
    assert (seen[:2] == 0).all()
    assert (seen[2:] == 1).all()
    sizes = [sum(p.box[0][1] - p.box[0][0] for p in layout.pieces) for layout in owned]
    assert max(sizes) - min(sizes) <= 1
