"""Digests of samples by several trainer ranks, against the full tensors."""

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.layout.sampled_boxes import SampledBox
from megarl.reshard.transfer.bucket import digest
from megarl.reshard.transfer.sample_digests import PartDigests, digest_samples, merge_digests

FULL = {"w": torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), "v": torch.arange(5.0)}
TENSORS = {name: TensorSpec(tuple(tensor.shape), "float32") for name, tensor in FULL.items()}
SAMPLES = [
    SampledBox(1, "w", ((2, 7), (0, 3)), "float32"),
    SampledBox(0, "v", ((0, 5),), "bfloat16"),
]


def rank_digests(first: int, last: int, full: dict[str, torch.Tensor] = FULL) -> PartDigests:
    """Return the digests of a trainer rank that holds some rows of `w`, behind two other rows, and all of `v`."""
    local = {"w": torch.cat([torch.zeros(2, 3), full["w"][first:last]]), "v": full["v"]}
    pieces = (
        ShardPiece("w", ((first, last), (0, 3)), "w", ((2, 2 + last - first), (0, 3))),
        ShardPiece("v", ((0, 5),), "v", ((0, 5),)),
    )
    return digest_samples(WeightLayout(TENSORS, pieces), local, SAMPLES)


def test_samples_are_put_together_from_the_parts_of_all_ranks():
    expected = merge_digests(SAMPLES, [rank_digests(0, 4), rank_digests(4, 8), rank_digests(0, 4)])
    assert [(box.tp_rank, box.tensor, box.box) for box in expected] == [
        (1, "w", ((2, 4), (0, 3))),
        (1, "w", ((4, 7), (0, 3))),
        (0, "v", ((0, 5),)),
    ]
    dtypes = {"w": torch.float32, "v": torch.bfloat16}
    for box in expected:
        assert box.digest == digest(FULL[box.tensor][slices(box.box)].to(dtypes[box.tensor]))


def test_trainer_ranks_that_differ_are_named():
    """Data-parallel replicas that have diverged."""
    other = {"w": FULL["w"].clone(), "v": FULL["v"]}
    other["w"][3, 1] += 1e-6
    with pytest.raises(WeightSyncError, match=r"trainer ranks 0 and 2 hold different values of w at \[\(2, 4\), "):
        merge_digests(SAMPLES, [rank_digests(0, 4), rank_digests(4, 8), rank_digests(0, 4, other)])


def test_a_sample_that_no_rank_holds_is_an_error():
    with pytest.raises(WeightSyncError, match=r"no trainer rank holds w at \[\(2, 7\), \(0, 3\)\]"):
        merge_digests(SAMPLES, [rank_digests(0, 1)])
