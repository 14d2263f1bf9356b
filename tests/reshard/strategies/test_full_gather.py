"""HybridFlow's table 2 for the baselines, and the distribution of ownership."""

import numpy as np
import pytest

from megarl.reshard.analysis.forecast import forecast, redundant_bytes
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.strategies.full_gather import owned_parts
from tests.reshard.scenarios import scenario
from tests.reshard.synthetic import MODEL_BYTES

FRACTIONS = {  # p-t-d -> p_g-t_g: fraction of the model received by every rank with ds_chat, hybridflow_v, micro_dp
    (1, 4, 2, 1, 2): (0.875, 0.750, 0.250),
    (1, 8, 2, 1, 4): (0.9375, 0.875, 0.125),
    (2, 8, 2, 2, 4): (0.96875, 0.9375, 0.0625),
    (8, 8, 2, 1, 8): (0.9921875, 0.984375, 0.109375),
}


@pytest.mark.parametrize("layout", FRACTIONS)
@pytest.mark.parametrize("index", range(3))
def test_received_bytes_match_closed_form(layout, index):
    case = scenario(*layout)
    strategy = ("ds_chat", "hybridflow_v", "micro_dp")[index]
    received = {of_rank.bytes_received for of_rank in forecast(arrange(strategy, case), case).stats}
    assert received == {FRACTIONS[layout][index] * MODEL_BYTES}


@pytest.mark.parametrize("layout", list(FRACTIONS)[:3])
def test_redundant_bytes_match_the_paper(layout):
    case = scenario(*layout)
    p, t, d, _, _ = layout
    kept = {s: redundant_bytes(arrange(s, case), case.sources) for s in ("ds_chat", "hybridflow_v", "micro_dp")}
    assert kept == {"ds_chat": MODEL_BYTES / (t * p * d), "hybridflow_v": MODEL_BYTES / (t * p), "micro_dp": 0}


@pytest.mark.parametrize("strategy", ["ds_chat", "hybridflow_v"])
def test_peak_memory_includes_the_full_model(strategy):
    case = scenario(1, 4, 2, 1, 2, bucket_bytes=8192)
    for of_rank in forecast(arrange(strategy, case), case).stats:
        assert MODEL_BYTES < of_rank.peak_extra_bytes <= MODEL_BYTES + 2 * 8192
        assert of_rank.bytes_delivered == MODEL_BYTES / 2


def test_hybridflow_v_stays_in_its_training_replica():
    case = scenario(2, 2, 2, 1, 2)
    between = forecast(arrange("hybridflow_v", case), case).bytes_between
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
