"""Packing trajectories: alignment of inputs and targets, padding and dtypes."""

import numpy as np
import pytest
import torch

from megarl.batch.pack import pack, padded_length
from megarl.batch.trajectory import Trajectory
from tests.errors import expect_error

TOKENS = ("token_ids_T", "position_ids_T", "target_ids_T", "mask_T", "rollout_logprobs_T", "sequence_tokens_T")


def make_trajectory(length: int, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.5
    mask[0] = False
    return Trajectory(
        prompt_id=str(seed),
        group_id=0,
        token_ids=rng.integers(1, 1000, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def make_columns(trajectories):
    """Return a column with one number per trajectory, and one with a number per token."""
    rng = np.random.default_rng(9)
    return {
        "advantages": [1.5 * (i + 1) for i in range(len(trajectories))],
        "values": [rng.normal(size=t.num_tokens).astype(np.float32) for t in trajectories],
    }


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("lengths", [(1,), (2,), (7, 1, 1, 5), (3, 3, 3, 3), (16,), (40, 2)])
def test_every_position_holds_the_values_of_the_token_it_predicts(lengths, multiple):
    trajectories = [make_trajectory(n, seed) for seed, n in enumerate(lengths)]
    columns = make_columns(trajectories)
    batch = pack(trajectories, columns, multiple=multiple)
    total = sum(lengths)
    assert len(batch.token_ids_T) == -(-total // multiple) * multiple
    t = 0
    for s, trajectory in enumerate(trajectories):
        for position in range(trajectory.num_tokens):
            assert batch.token_ids_T[t] == trajectory.token_ids[position]
            assert batch.position_ids_T[t] == position
            last = position == trajectory.num_tokens - 1
            assert bool(batch.mask_T[t]) == (not last and bool(trajectory.loss_mask[position + 1]))
            if not last:
                assert batch.target_ids_T[t] == trajectory.token_ids[position + 1]
                assert batch.rollout_logprobs_T[t] == trajectory.logprobs[position + 1]
                assert batch.columns["values"][t] == columns["values"][s][position + 1]
            assert batch.columns["advantages"][t] == columns["advantages"][s]
            assert batch.sequence_tokens_T[t] == max(1, trajectory.loss_mask.sum())
            assert batch.sequence_ids_T[t] == s
            assert bool(batch.ends_T[t]) == last
            t += 1
    assert not batch.mask_T[total:].any()
    assert not batch.ends_T[total:].any()
    bounds = [0, *np.cumsum(lengths).tolist()]
    padding = [len(batch.token_ids_T)] if len(batch.token_ids_T) > total else []
    assert batch.cu_seqlens_S.tolist() == bounds + padding
    assert (batch.sequence_ids_T[total:] == len(lengths)).all()


def test_dtypes_match_the_documentation():
    batch = pack([make_trajectory(5, 0)], {"advantages": [1]})
    names = (*TOKENS, "sequence_ids_T", "ends_T", "cu_seqlens_S")
    dtypes = [str(getattr(batch, name).dtype).removeprefix("torch.") for name in names]
    assert dtypes == ["int64", "int64", "int64", "bool", "float32", "float32", "int64", "bool", "int32"]
    assert batch.columns["advantages"].dtype == torch.float32


@pytest.mark.parametrize(("multiple", "sequence_multiple"), [(4, 4), (24, 8)])
def test_each_sequence_is_padded(multiple, sequence_multiple):
    trajectories = [make_trajectory(n, n) for n in (7, 1, 8, 5)]
    columns = make_columns(trajectories)
    plain = pack(trajectories, columns)
    batch = pack(trajectories, columns, multiple=multiple, sequence_multiple=sequence_multiple)
    assert len(batch.token_ids_T) % multiple == 0
    bounds = batch.cu_seqlens_S.tolist()
    assert all(bound % sequence_multiple == 0 for bound in bounds)
    index = np.concatenate([np.arange(a, a + t.num_tokens) for a, t in zip(bounds, trajectories, strict=False)])
    taken = batch.take(torch.from_numpy(index))
    for name in ("token_ids_T", "position_ids_T", "mask_T", "sequence_tokens_T", "sequence_ids_T", "ends_T"):
        assert torch.equal(getattr(taken, name), getattr(plain, name)), name
    for name in ("target_ids_T", "rollout_logprobs_T"):
        assert torch.equal(getattr(taken, name)[plain.mask_T], getattr(plain, name)[plain.mask_T]), name
    for name, column_T in plain.columns.items():
        assert torch.equal(taken.columns[name][plain.mask_T], column_T[plain.mask_T]), name
    assert torch.equal(taken.columns["advantages"], plain.columns["advantages"])
    assert batch.mask_T.sum() == plain.mask_T.sum()


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_sequences_are_padded_to_two_equal_chunks_per_context_parallel_rank(cp):
    chunks = 2 * cp if cp > 1 else 1
    for length in range(1, 30):
        assert padded_length(length, cp) == min(n for n in range(length, length + chunks) if n % chunks == 0)


@pytest.mark.parametrize("multiple", [1, 8])
def test_an_empty_batch_is_one_masked_sequence(multiple):
    batch = pack([], {"advantages": []}, multiple=multiple)
    assert batch.cu_seqlens_S.tolist() == [0, multiple]
    assert not batch.mask_T.any()
    assert not batch.ends_T.any()
    assert batch.columns["advantages"].tolist() == [0.0] * multiple


def test_a_sampled_first_token_is_refused():
    trajectory = make_trajectory(4, 0)
    trajectory.loss_mask[0] = True
    with expect_error(AssertionError, "before", "needs"):
        pack([trajectory])
