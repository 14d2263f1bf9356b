"""References to the samples of a step, as columns of numbers, and micro-batches packed from their trajectories.

Shapes: N samples, T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Trajectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ColumnName: TypeAlias = str
"""Name of a per-token or per-sequence input of losses that is not part of a trajectory, such as `advantages`."""

EPISODE_TOKENS: ColumnName = "episode_tokens"
"""Column with the number of trained tokens of each sequence's episode, where an episode may be several sequences."""

PerToken = np.ndarray
"""float32 [n] for a trajectory of n tokens: entry i belongs to token i, given the tokens before it."""

SampleKey = tuple[int, int]
"""Identifies a trajectory of a step: (payload index, index within that payload)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """Reference to one trajectory, with the per-sequence values that the controller computed."""

    payload: int
    """Index into the `payloads` of the request."""
    index: int
    """Index of the trajectory within that payload."""
    num_tokens: int
    scalars: Mapping[ColumnName, float] = field(default_factory=dict)
    """Columns with one value for the whole sequence, such as its advantage."""

    @property
    def key(self) -> SampleKey:
        """The (payload, index) pair that identifies the trajectory within the step."""
        return self.payload, self.index


@dataclass(frozen=True, eq=False)
class SampleTable(Sequence[SampleRef]):
    """A sequence of `SampleRef`s in arrays: requests of 100,000 samples are split and sent without a loop over them."""

    keys_N2: NDArray[np.int64]
    """[N, 2]: payload and index of each sample."""
    num_tokens_N: NDArray[np.int64]
    """[N]: prompt and completion tokens of each sample."""
    scalars: Mapping[ColumnName, NDArray[np.float64]] = field(default_factory=dict)
    """Columns with one value for each sequence, [N] each."""

    @classmethod
    def of(cls, samples: Sequence[SampleRef]) -> SampleTable:
        """Return the table of these samples, all of which need the same scalars."""
        if isinstance(samples, SampleTable):
            return samples
        names = samples[0].scalars if samples else ()
        assert all(sample.scalars.keys() == samples[0].scalars.keys() for sample in samples), (
            "samples differ in columns"
        )
        return cls(
            np.array([sample.key for sample in samples], np.int64).reshape(-1, 2),
            np.array([sample.num_tokens for sample in samples], np.int64),
            {name: np.array([sample.scalars[name] for sample in samples], np.float64) for name in names},
        )

    def take(self, indices: NDArray[np.intp]) -> SampleTable:
        """Return the table of the samples at these indices."""
        return SampleTable(
            self.keys_N2[indices],
            self.num_tokens_N[indices],
            {name: values_N[indices] for name, values_N in self.scalars.items()},
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.num_tokens_N.sum())

    @property
    def payloads(self) -> list[int]:
        """Indices of the payloads that hold a sample, ascending."""
        found: list[int] = np.unique(self.keys_N2[:, 0]).tolist()
        return found

    def __len__(self) -> int:
        return len(self.num_tokens_N)

    @overload
    def __getitem__(self, index: int) -> SampleRef: ...

    @overload
    def __getitem__(self, index: slice) -> SampleTable: ...

    def __getitem__(self, index: int | slice) -> SampleRef | SampleTable:
        """Return one sample, or the table of a slice."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        payload, number = self.keys_N2[index].tolist()
        return SampleRef(
            payload=payload,
            index=number,
            num_tokens=int(self.num_tokens_N[index]),
            scalars={name: float(values_N[index]) for name, values_N in self.scalars.items()},
        )

    def __iter__(self) -> Iterator[SampleRef]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as other sequences that compare by value


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Trajectories concatenated along one token axis.

    Position t holds token t as input; all other fields refer to the token it predicts, t + 1: `target_ids_T[t]` is
    `token_ids_T[t + 1]`, `mask_T[t]` is True if the policy sampled that token, and so on. The last position of a
    sequence predicts nothing and is masked.
    """

    token_ids_T: Tensor
    """int64 [T]: input token ids."""
    position_ids_T: Tensor
    """int64 [T]: position within the sequence, from 0."""
    target_ids_T: Tensor
    """int64 [T]: ids of the predicted tokens."""
    mask_T: Tensor
    """bool [T]: whether the policy sampled the predicted token."""
    rollout_logprobs_T: Tensor
    """float32 [T]: log-probabilities of the predicted tokens from the rollout engine."""
    sequence_tokens_T: Tensor
    """float32 [T]: number of tokens that the policy sampled in the sequence of token t, or in its episode with the
    column `EPISODE_TOKENS`; at least 1."""
    sequence_ids_T: Tensor
    """int64 [T]: index in `cu_seqlens_S` of the sequence of token t."""
    ends_T: Tensor
    """bool [T]: True at the last token of each trajectory."""
    cu_seqlens_S: Tensor
    """int32 [S + 1]: sequence s is `cu_seqlens_S[s]:cu_seqlens_S[s + 1]`, its padding included. Padding of the pack is
    an additional masked sequence at the end."""
    columns: Mapping[ColumnName, Tensor] = field(default_factory=dict)
    """Column name -> float32 [T]. A per-sequence value is repeated at each of its tokens, the last included."""

    def take(self, index_t: Tensor) -> PackedBatch:
        """Select the tokens at `index_t`; `cu_seqlens_S` still describes the full pack."""
        tokens = {f.name: getattr(self, f.name)[index_t] for f in fields(self) if f.name.endswith("_T")}
        columns = {name: column_T[index_t] for name, column_T in self.columns.items()}
        return PackedBatch(**tokens, cu_seqlens_S=self.cu_seqlens_S, columns=columns)

    def to(self, device: torch.device) -> PackedBatch:
        """Return a copy on `device`."""
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "columns"}
        return PackedBatch(**tensors, columns={name: column_T.to(device) for name, column_T in self.columns.items()})

    def with_column(self, name: ColumnName, values_T: Tensor) -> PackedBatch:
        """Return a copy with column `name` added or replaced."""
        return replace(self, columns={**self.columns, name: values_T})


def padded_length(num_tokens: int, cp: int) -> int:
    """Return the padded length of a sequence with `cp` context-parallel ranks, each of which holds two chunks of it."""
    return num_tokens if cp == 1 else num_tokens + -num_tokens % (2 * cp)


def pack(
    trajectories: Sequence[Trajectory],
    columns: Mapping[ColumnName, Sequence[float | PerToken]] | None = None,
    *,
    multiple: int = 1,
    sequence_multiple: int = 1,
) -> PackedBatch:
    """Concatenate trajectories into a packed batch.

    Without trajectories the batch is one masked sequence of padding, as all ranks run equally many micro-batches.

    Args:
        columns: column name -> one entry per trajectory: a number for all its tokens, or an array with one per token.
        multiple: T is padded to a multiple of this; must be a multiple of `sequence_multiple`.
        sequence_multiple: every sequence is padded on the right to a multiple of this.
    """
    import torch  # here, because the controller imports this module for the names of columns

    assert multiple % sequence_multiple == 0, f"{multiple} % {sequence_multiple} != 0"
    for trajectory in trajectories:
        assert not trajectory.loss_mask[0], f"{trajectory.prompt_id}: a sampled token needs a token before it"
    lengths = [t.num_tokens + -t.num_tokens % sequence_multiple for t in trajectories]
    total = sum(lengths)
    padding = multiple if total == 0 else -total % multiple
    lengths += [padding] if padding else []
    totals = (columns or {}).get(EPISODE_TOKENS, [float(t.loss_mask.sum()) for t in trajectories])
    counts = [np.full(t.num_tokens, max(1, total), np.float32) for t, total in zip(trajectories, totals, strict=True)]
    token_ids_T = _concatenate_padded([t.token_ids for t in trajectories], lengths, np.int64)
    return PackedBatch(
        token_ids_T=token_ids_T,
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        # First tokens are never sampled, so the value rolled in from the next sequence is always masked.
        target_ids_T=token_ids_T.roll(-1),
        mask_T=_concatenate_padded([t.loss_mask for t in trajectories], lengths, np.bool_).roll(-1),
        rollout_logprobs_T=_concatenate_padded([t.logprobs for t in trajectories], lengths, np.float32).roll(-1),
        sequence_tokens_T=_concatenate_padded(counts, lengths, np.float32).clamp(min=1),
        sequence_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        ends_T=_concatenate_padded([_last_token_mask(t.num_tokens) for t in trajectories], lengths, np.bool_),
        cu_seqlens_S=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        columns={name: _pack_column(trajectories, values, lengths) for name, values in (columns or {}).items()},
    )


def _pack_column(
    trajectories: Sequence[Trajectory], values: Sequence[float | PerToken], lengths: Sequence[int]
) -> Tensor:
    # a per-trajectory number is repeated at all tokens; per-token values are shifted to the position that predicts them
    arrays = [
        np.roll(value, -1) if isinstance(value, np.ndarray) else np.full(t.num_tokens, value, np.float32)
        for t, value in zip(trajectories, values, strict=True)
    ]
    return _concatenate_padded(arrays, lengths, np.float32)


def _last_token_mask(num_tokens: int) -> np.ndarray:
    end: np.ndarray = np.arange(num_tokens) == num_tokens - 1
    return end


def _concatenate_padded(arrays: Sequence[np.ndarray], lengths: Sequence[int], dtype: type) -> Tensor:
    """Concatenate arrays, each padded with zeros to its length."""
    import torch

    out: np.ndarray = np.zeros(sum(lengths), dtype)
    start = 0
    for array, length in zip(arrays, lengths, strict=False):
        out[start : start + len(array)] = array
        start += length
    return torch.from_numpy(out)
