"""The samples of one data-parallel replica in a few large arrays, which its ranks read from shared memory.

    controller -- request with references --> first rank of a replica: `pack_samples`
                                                     |
                        ranks of the replica <-- request with arrays (one object, read without a copy)

A rank that fetched each group by itself would handle dozens of objects with dozens of arrays each.
Shapes: N samples, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import ColumnName, PerToken
from megarl.batch.sample_table import SampleKey, SampleTable
from megarl.batch.trajectory import Trajectory
from megarl.megatron.requests import ForwardRequest, TokenColumn, TrainRequest, Trajectories
from megarl.megatron.token_column import merge_column
from megarl.megatron.training.samples import payloads_by_index
from megarl.workers.payload import LocalPayload, Payload, fetch_all

R = TypeVar("R", TrainRequest, ForwardRequest)


@dataclass(frozen=True, eq=False)
class PackedTrajectories(Mapping[int, Payload[Trajectories]]):
    """Trajectories of several payloads, by payload and index; each is made at its access, of slices of the arrays."""

    sample_keys: tuple[SampleKey, ...]
    """N keys, group after group."""
    offsets: NDArray[np.int64]
    """[N + 1]: offsets of the samples in the arrays."""
    token_ids: NDArray[np.int32]
    """[T]; this and the other fields hold those of the same name of all trajectories."""
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    prompt_id: tuple[str, ...]
    group_id: tuple[int, ...]
    rewards: tuple[Mapping[str, float], ...]
    reward: tuple[float, ...]
    reward_errors: tuple[Mapping[str, str], ...]
    finish_reason: tuple[str, ...]
    segment: tuple[int, ...]
    turn_rewards: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, trajectories: Mapping[SampleKey, Trajectory]) -> PackedTrajectories:
        """Return a copy of at least one trajectory."""
        keys = sorted(trajectories)
        ordered = [trajectories[key] for key in keys]
        return cls(
            sample_keys=tuple(keys),
            offsets=np.cumsum([0, *(t.num_tokens for t in ordered)]),
            token_ids=np.concatenate([t.token_ids for t in ordered]),
            loss_mask=np.concatenate([t.loss_mask for t in ordered]),
            logprobs=np.concatenate([t.logprobs for t in ordered]),
            policy_versions=np.concatenate([t.policy_versions for t in ordered]),
            prompt_id=tuple(t.prompt_id for t in ordered),
            group_id=tuple(t.group_id for t in ordered),
            rewards=tuple(t.rewards for t in ordered),
            reward=tuple(t.reward for t in ordered),
            reward_errors=tuple(t.reward_errors for t in ordered),
            finish_reason=tuple(t.finish_reason for t in ordered),
            segment=tuple(t.segment for t in ordered),
            turn_rewards=tuple(t.turn_rewards for t in ordered),
        )

    @cached_property
    def _positions(self) -> dict[int, dict[int, int]]:
        """Position in the arrays by payload and index."""
        found: dict[int, dict[int, int]] = {}
        for position, (number, index) in enumerate(self.sample_keys):
            found.setdefault(number, {})[index] = position
        return found

    def __getitem__(self, number: int) -> LocalPayload[Trajectories]:
        return LocalPayload(_Members(self, self._positions[number]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def at(self, position: int) -> Trajectory:
        """Return one of the N trajectories."""
        tokens = slice(*self.offsets[position : position + 2].tolist())
        return Trajectory(
            prompt_id=self.prompt_id[position],
            group_id=self.group_id[position],
            token_ids=self.token_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            logprobs=self.logprobs[tokens],
            policy_versions=self.policy_versions[tokens],
            rewards=self.rewards[position],
            reward=self.reward[position],
            reward_errors=self.reward_errors[position],
            finish_reason=self.finish_reason[position],
            segment=self.segment[position],
            turn_rewards=self.turn_rewards[position],
        )


@dataclass(frozen=True, eq=False)
class _Members(Mapping[int, Trajectory]):
    """The trajectories of one payload by their index."""

    packed: PackedTrajectories
    positions: Mapping[int, int]

    def __getitem__(self, index: int) -> Trajectory:
        return self.packed.at(self.positions[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class PackedColumn(Mapping[SampleKey, PerToken]):
    """Values per token of N samples in one array, by sample key."""

    sample_keys: tuple[SampleKey, ...]
    offsets: NDArray[np.int64]
    """[N + 1]: offsets of the samples in the array."""
    tokens: PerToken
    """float32 [T]"""

    @classmethod
    def of(cls, column: TokenColumn, keys: Sequence[SampleKey]) -> PackedColumn:
        """Return a copy of the values of these samples."""
        merged = merge_column(column)
        parts = [merged[key] for key in keys]
        return cls(tuple(keys), np.cumsum([0, *map(len, parts)]), np.concatenate(parts))

    @cached_property
    def _positions(self) -> dict[SampleKey, int]:
        return {key: position for position, key in enumerate(self.sample_keys)}

    def __getitem__(self, key: SampleKey) -> PerToken:
        position = self._positions[key]
        values: PerToken = self.tokens[self.offsets[position] : self.offsets[position + 1]]
        return values

    def __iter__(self) -> Iterator[SampleKey]:
        return iter(self.sample_keys)

    def __len__(self) -> int:
        return len(self.sample_keys)


def pack_samples(request: R) -> R:
    """Fetch the samples and columns of a replica's request; return the request with their copies in large arrays."""
    tables = request.mini_batches if isinstance(request, TrainRequest) else (request,)
    keys = sorted({key for each in tables for key in SampleTable.of(each.samples).key_list()})
    if not keys:
        return request
    by_index: dict[int, Payload[Trajectories]] = payloads_by_index(request)
    columns: Mapping[ColumnName, Payload[TokenColumn]] = request.columns if isinstance(request, TrainRequest) else {}
    wanted: list[Payload[Any]] = [*by_index.values(), *columns.values()]
    fetched = fetch_all(wanted)  # all in one call
    groups: dict[int, Trajectories] = dict(zip(by_index, fetched, strict=False))
    packed = PackedTrajectories.of({(number, index): groups[number][index] for number, index in keys})
    if not isinstance(request, TrainRequest):
        return replace(request, payloads=packed)
    by_name = zip(columns, fetched[len(by_index) :], strict=True)
    own = {name: LocalPayload([PackedColumn.of(column, keys)]) for name, column in by_name}
    return replace(request, payloads=packed, columns=own)
