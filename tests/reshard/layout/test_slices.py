"""Slices of tensors, their rounds, and the buffers of a round, against brute force."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.layout.slices import (
    PADDING,
    Loads,
    Slices,
    Stages,
    are_contiguous,
    cut_rounds,
    share_buffers,
)


@st.composite
def stages_of_tensors(draw):
    """Return (rows of each tensor, stages, number of slices of each stage)."""
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    of = np.array(draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    needed_by = np.array(draw(st.lists(st.sampled_from([5, 9]), min_size=len(rows), max_size=len(rows))))
    stages = Stages.of(of, needed_by, np.array(rows) * 6, np.array([1, 2, 3]))
    same = [(a, b) for a, b in product(range(len(rows)), repeat=2) if stages.stage[a] == stages.stage[b]]
    keys = list(zip(of.tolist(), needed_by.tolist(), strict=True))
    assert same == [(a, b) for a, b in product(range(len(rows)), repeat=2) if keys[a] == keys[b]]
    return rows, stages, np.array([draw(st.integers(1, 20)) for _ in stages.total])


@given(stages_of_tensors(), st.integers(1, 20))
@settings(max_examples=200)
def test_slices_cover_each_row_once_in_the_order_of_the_stage(case, num_rounds):
    rows, stages, count = case
    slices = Slices(stages, count, stages.total, num_rounds)
    tensors = np.arange(len(rows))
    low, high = np.zeros((len(rows), 2), np.int64), np.array([[n, 3] for n in rows])
    row, start, stop, item = slices.cut(tensors, low, high, low[:, 0], high[:, 0])
    covered = Counter((int(t), r) for t, a, b in zip(row, start[:, 0], stop[:, 0], strict=True) for r in range(a, b))
    assert covered == {(t, r): 1 for t, n in enumerate(rows) for r in range(n)}
    assert (slices.tensor_of_item[item] == row).all()
    for stage in range(len(stages.total)):
        mine = stages.stage[row] == stage
        turns = slices.turn[item[mine]]
        assert (np.diff(turns) >= 0).all()
        assert turns.max() < count[stage]
        size = np.bincount(turns, (stop - start)[mine, 0] * 6, count[stage])
        assert np.abs(np.cumsum(size) - np.arange(1, count[stage] + 1) * size.sum() / count[stage]).max() <= 3.001


@given(stages_of_tensors(), st.integers(1, 20), st.integers(2, 7))
@settings(max_examples=100)
def test_boxes_of_other_heights_are_cut_at_the_same_shares(case, num_rounds, factor):
    """A tensor-parallel rank holds fewer rows; each of its slices has the same share of the box."""
    rows, stages, count = case
    slices = Slices(stages, count, stages.total, num_rounds)
    tensors = np.arange(len(rows))
    first = np.array([[5 * factor, 0]] * len(rows))
    shares = []
    for height in (1, factor):
        end = first + [[n * height, 3] for n in rows]
        _, start, stop, item = slices.cut(tensors, first, end, first[:, 0], end[:, 0])
        edges = (np.stack([start[:, 0], stop[:, 0]], axis=1) - 5 * factor) / height
        shares.append(dict(zip(item.tolist(), edges, strict=True)))
    both = shares[0].keys() & shares[1].keys()  # of a box of few rows, a slice may have none
    for item in both:
        assert np.abs(shares[0][item] - shares[1][item]).max() <= 1


def test_rows_that_are_held_one_by_one_are_in_the_slices_at_their_share_of_the_needed_box():
    """Eight experts, each held as a tensor of its own, which an engine needs in one."""
    stages = Stages.of(np.array([0]), np.array([0]), np.array([8 * 100]), np.array([1]))
    slices = Slices(stages, np.array([16]), stages.total, 16)
    rows = np.arange(8)[:, None]
    row, start, stop, item = slices.cut(np.zeros(8, int), rows, rows + 1, np.zeros(8, int), np.full(8, 8))
    assert (row == start[:, 0]).all()
    assert (row + 1 == stop[:, 0]).all()
    assert np.unique(slices.turn[item] // 2).tolist() == list(range(8))


def test_stages_of_few_slices_fill_rounds_equally_and_lanes_apart():
    """As many stages as a mixture of experts has on 64 ranks in 16 stages of its pipeline; 500 rounds of 10 slices."""
    num_stages, num_rounds, num_lanes = 1024, 500, 8
    size = np.full(num_stages, 5 * 8)
    stages = Stages.of(np.arange(num_stages), np.zeros(num_stages), size, np.full(num_stages, 2))
    slices = Slices(stages, np.full(num_stages, 5), size, num_rounds, num_lanes)
    low, high = np.zeros((num_stages, 1), int), np.full((num_stages, 1), 40)
    _, _, _, item = slices.cut(np.arange(num_stages), low, high, low[:, 0], high[:, 0])
    assert len(item) == num_stages * 5
    rounds = np.array([slices.round[slices.place(item, np.full(len(item), lane))] for lane in range(num_lanes)])
    for of_lane in rounds:
        per_round = np.bincount(of_lane, minlength=num_rounds)
        assert set(per_round) <= {10, 11}
    for stage in (0, 511, 1023):  # what its holders pack for all lanes is spread too
        assert len(np.unique(rounds[:, stages.stage[slices.tensor_of_item[item]] == stage])) == 5 * num_lanes


def test_stages_of_many_slices_are_in_every_round_alike():
    stages = Stages.of(np.array([0, 1, 0]), np.zeros(3), np.array([600, 5000, 300]), np.array([1, 1]))
    slices = Slices(stages, np.array([24, 12]), stages.total, 12, 4)
    edges = np.array([[600], [5000], [300]])
    _, _, _, item = slices.cut(np.arange(3), np.zeros_like(edges), edges, np.zeros(3, int), edges[:, 0])
    rounds = slices.round[slices.place(item, np.zeros(len(item), int))]
    stage = stages.stage[slices.tensor_of_item[item]]
    for number, per_round in ((0, 2), (1, 1)):
        mine = np.stack([rounds, slices.turn[item]], axis=1)[stage == number]
        found = np.unique(mine, axis=0)[:, 0]  # a slice may lie in two tensors
        assert np.bincount(found).tolist() == [per_round] * 12


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 30)), max_size=30),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.permutations(range(10)),
    st.lists(st.integers(0, 3), min_size=10, max_size=10).map(sorted),
)
@settings(max_examples=400)
def test_rounds_are_as_long_as_the_limits_allow(loads, limits, order, rounds):
    """Owners 0 and 1 have the first limit, 2 and 3 the second; places are items, in another order of transfer."""
    of_place, order = np.empty(10, np.int64), np.array(order)
    of_place[order] = rounds
    limited = []
    for number, limit in enumerate(limits):
        rows = [(owner, order[item], size) for owner, item, size in loads if owner // 2 == number]
        limited.append((Loads(*np.array(rows, np.int64).reshape(-1, 3).T), limit))
    found = cut_rounds(of_place, order, limited)[order].tolist()
    expected, start = [], 0
    for position in range(10):
        sums = {who: sum(n for o, i, n in loads if o == who and start <= i <= position) for who in range(4)}
        now = {who: sum(n for o, i, n in loads if o == who and i == position) for who in range(4)}
        is_over = any(sums[who] > limits[who // 2] and sums[who] > now[who] and now[who] for who in range(4))
        if is_over or rounds[position] != rounds[position - 1]:
            start = position
        expected.append(start)
    assert found == [sorted(set(expected)).index(start) for start in expected]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4))
@settings(max_examples=200)
def test_contiguity_agrees_with_torch(dims):
    extent = [before + length + after for before, after, length in dims]
    start = [before for before, _, _ in dims]
    stop = [before + length for before, _, length in dims]
    box = torch.zeros(extent)[tuple(map(slice, start, stop))]
    assert are_contiguous(*(np.array([x]) for x in (start, stop, extent))).tolist() == [box.is_contiguous()]


@given(st.integers(64, 1 << 28), st.integers(1, 5), st.integers(0, 10**11), st.integers(0, 10**11))
@settings(max_examples=200)
def test_buffers_take_two_buckets_in_the_ratio_of_what_has_to_fit(bucket_bytes, num_hops, received, packed):
    bucket, staging = share_buffers(bucket_bytes, num_hops, received, packed)
    assert (num_hops + 1) * bucket + 2 * staging <= 2 * bucket_bytes
    if bucket_bytes > 1 << 20:
        assert (num_hops + 1) * (bucket + PADDING) + 2 * (staging + PADDING) == pytest.approx(
            2 * bucket_bytes, rel=0.001
        )
        ratio = min(max(packed / max(received, 1), 1 / 16), 16)
        assert max(received, packed) < 1000 or staging / bucket == pytest.approx(ratio, rel=0.1)
