"""The completions of a batch that are not dropped, numbered once.

Metrics, estimates and training requests each ask for them several times in a step; with 100,000 completions, numbering
them again for each question would be most of the controller's work.

Shapes: N completions of all groups, numbered group after group; S sequences that they consist of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.sample_table import SampleKey
from megarl.rollout.rollout_worker import SUMMARY_POSITIONS, TrajectorySummary
from megarl.run.remote.group_stream import FinishedGroup


class KeptCompletions:
    """The N kept completions of some groups, in columns that are computed when they are first read."""

    def __init__(self, groups: Sequence[FinishedGroup]) -> None:
        self.groups = groups
        self._kept = [group.summary.kept for group in groups]
        """Indices of the kept completions of each group."""
        self._columns: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        """Return the number of completions, N."""
        return sum(self._sizes)

    def column(self, name: str) -> list[Any]:
        """Return a field of the summaries of the N completions."""
        if name not in self._columns:
            of_groups: Sequence[tuple[Any, ...]] = self._column_of_groups(name)
            if not self.is_complete:
                of_groups = [tuple([of[i] for i in kept]) for of, kept in zip(of_groups, self._kept, strict=True)]
            self._columns[name] = list(chain.from_iterable(of_groups))
        return self._columns[name]

    @cached_property
    def summaries(self) -> list[TrajectorySummary]:
        """Summaries of the N completions, as objects; `column` reads one field of all."""
        return [
            group.summary.trajectories[i] for group, kept in zip(self.groups, self._kept, strict=True) for i in kept
        ]

    def _column_of_groups(self, name: str) -> Sequence[tuple[Any, ...]]:
        """Return a field of the summaries of each group's episodes, dropped ones included."""
        return self._columns_of_groups[SUMMARY_POSITIONS[name]] if self.groups else ()

    @cached_property
    def _columns_of_groups(self) -> Sequence[Sequence[tuple[Any, ...]]]:
        """By field of the summaries, its values in each group."""
        return list(zip(*[group.summary.columns for group in self.groups], strict=True))

    @cached_property
    def keys(self) -> list[SampleKey]:
        """N keys: (index of the group, index of the completion within the group)."""
        return [(p, i) for p, kept in enumerate(self._kept) for i in kept]

    @cached_property
    def group_numbers(self) -> NDArray[np.int64]:
        """Index of the group of each completion, [N]."""
        return np.repeat(np.arange(len(self._kept)), self._sizes)

    @cached_property
    def group_ids(self) -> list[int]:
        """`group_numbers` as a list."""
        ids: list[int] = self.group_numbers.tolist()
        return ids

    @property
    def group_offsets(self) -> list[int]:
        """Index of the first completion of each group."""
        return [0, *accumulate(self._sizes)][:-1]

    @cached_property
    def num_segments(self) -> NDArray[np.int64]:
        """Number of sequences of each completion, [N]."""
        if not self.is_forked:
            return np.ones(len(self), np.int64)
        return np.array([len(tokens) or 1 for tokens in self.column("segment_tokens")], np.int64)

    @cached_property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """Number of sequences before each completion, and that of all, [N + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.num_segments)])

    @cached_property
    def sequence_keys(self) -> NDArray[np.int64]:
        """Key of each sequence, index of the group and index within the group's payload, [S, 2]."""
        if not self.is_forked:
            index_N = np.fromiter(chain.from_iterable(self._kept), np.int64, len(self))
            return np.stack([self.group_numbers, index_N], axis=1)
        keys: list[SampleKey] = []
        for p, (group, kept) in enumerate(zip(self.groups, self._kept, strict=True)):
            first = [0, *accumulate(len(tokens) or 1 for tokens in group.summary.column("segment_tokens"))]
            keys += [(p, s) for i in kept for s in range(first[i], first[i + 1])]
        return np.array(keys, np.int64).reshape(-1, 2)

    @cached_property
    def sequence_tokens(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, [S]."""
        num_tokens = self.column("num_tokens")
        if not self.is_forked:
            return np.array(num_tokens, np.int64)
        of_segments = zip(self.column("segment_tokens"), num_tokens, strict=True)
        return np.array([n for tokens, total in of_segments for n in tokens or (total,)], np.int64)

    @cached_property
    def segment_keys(self) -> list[list[SampleKey]]:
        """Keys of the sequences of each of the N completions."""
        keys, offsets = list(map(tuple, self.sequence_keys.tolist())), self.sequence_offsets.tolist()
        return [keys[offsets[n] : offsets[n + 1]] for n in range(len(self))]

    @cached_property
    def response_lengths(self) -> list[int]:
        """Numbers of sampled tokens of the N completions."""
        return self.column("response_length")

    @cached_property
    def rewards(self) -> list[float]:
        """Total rewards of the N completions."""
        return self.column("reward")

    @cached_property
    def _sizes(self) -> list[int]:
        return list(map(len, self._kept))

    @cached_property
    def is_complete(self) -> bool:
        """Whether all episodes of the groups are kept."""
        sizes = [len(group.summary.trajectories) for group in self.groups]
        return sizes == self._sizes

    @cached_property
    def is_forked(self) -> bool:
        """Whether an episode of the groups, also a dropped one, has several segments."""
        return any(map(any, self._column_of_groups("segment_tokens")))
