"""HybridFlow's table 2 for the baselines, and the distribution of ownership."""

import numpy as np
import pytest

from megarl.reshard.analysis.forecast import forecast, redundant_bytes
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.strategies.full_gather import owned_parts
from tests.reshard.scenarios import scenario
from tests.reshard.synthetic import MODEL_BYTES

BYTES = {  # p-t-d -> p_g-t_g: fractions of the model that every rank receives, and then holds in excess
    (1, 4, 2, 1, 2): {"ds_chat": (0.875, 1 / 8), "hybridflow_v": (0.750, 1 / 4), "micro_dp": (0.250, 0)},
    (1, 8, 2, 1, 4): {"ds_chat": (0.9375, 1 / 16), "hybridflow_v": (0.875, 1 / 8), "micro_dp": (0.125, 0)},
    (2, 8, 2, 2, 4): {"ds_chat": (0.96875, 1 / 32), "hybridflow_v": (0.9375, 1 / 16), "micro_dp": (0.0625, 0)},
    (8, 8, 2, 1, 8): {"hybridflow_v": (0.984375, 0), "micro_dp": (0.109375, 0)},
}


@pytest.mark.parametrize("layout", BYTES)
def test_received_and_redundant_bytes_are_those_of_the_paper(layout):
    case = scenario(*layout)
    for strategy, (received, redundant) in BYTES[layout].items():
        arrangement = arrange(strategy, case)
        stats = forecast(arrangement, case).stats
        assert {of_rank.bytes_received for of_rank in stats} == {received * MODEL_BYTES}
        assert redundant_bytes(arrangement, case.sources) == redundant * MODEL_BYTES


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
