"""Priority queue of groups that are admitted and not trained yet, by deadline and ordinal."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True)
class _Bucket:
    """Groups with the same deadline."""

    unfinished: set[int] = field(default_factory=set)
    """Ordinals."""
    heap: list[int] = field(default_factory=list)
    """Heap of the unfinished ordinals, and of others that were unfinished."""
    finished: list[int] = field(default_factory=list)
    """Ordinals, ascending."""

    def __len__(self) -> int:
        return len(self.unfinished) + len(self.finished)

    def first_unfinished(self) -> int | None:
        while self.heap and self.heap[0] not in self.unfinished:
            heappop(self.heap)
        return self.heap[0] if self.heap else None


class DeadlineQueue:
    """A queue in the order of (deadline, ordinal), of groups that each become finished at some time.

    An event costs O(log n), and a check of the deadlines O(d), with n groups and d distinct deadlines.

    Examples:
        >>> queue = DeadlineQueue(groups_per_step=2)
        >>> for ordinal, deadline in [(0, 1), (1, 2), (2, 2), (3, 2)]:
        ...     queue.add(ordinal, deadline)
        >>> for ordinal, deadline in [(1, 2), (2, 2), (3, 2)]:
        ...     queue.finish(ordinal, deadline)
        >>> queue.missed_deadline(1, {2: 2})  # step 1 is the last that may train group 0
        1
        >>> queue.finish(0, 1)
        >>> queue.missed_deadline(1, queue.count_earliest_finished(2)), queue.earliest_finished(2)
        (None, [0, 1])
    """

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._buckets: dict[int, _Bucket] = {}
        """By deadline, ascending; none is empty."""
        self.num_finished = 0
        self.num_unfinished = 0

    def __len__(self) -> int:
        return self.num_finished + self.num_unfinished

    def add(self, ordinal: int, deadline: int) -> None:
        """Add an unfinished group."""
        bucket = self._buckets.get(deadline)
        if bucket is None:
            is_last = not self._buckets or deadline > next(reversed(self._buckets))
            bucket = self._buckets[deadline] = _Bucket()
            if not is_last:
                self._buckets = dict(sorted(self._buckets.items()))
        bucket.unfinished.add(ordinal)
        heappush(bucket.heap, ordinal)
        self.num_unfinished += 1

    def finish(self, ordinal: int, deadline: int) -> None:
        """Mark an unfinished group as finished."""
        bucket = self._buckets[deadline]
        bucket.unfinished.remove(ordinal)
        insort(bucket.finished, ordinal)
        self.num_unfinished -= 1
        self.num_finished += 1

    def remove(self, ordinal: int, deadline: int) -> None:
        """Remove a group, finished or not."""
        bucket = self._buckets[deadline]
        if ordinal in bucket.unfinished:
            bucket.unfinished.remove(ordinal)
            self.num_unfinished -= 1
        else:
            del bucket.finished[bisect_left(bucket.finished, ordinal)]
            self.num_finished -= 1
        if not bucket:
            del self._buckets[deadline]

    def remove_finished(self, ordinals: Iterable[int], deadline: int) -> None:
        """Remove several finished groups of one deadline."""
        bucket, removed = self._buckets[deadline], set(ordinals)
        kept = [ordinal for ordinal in bucket.finished if ordinal not in removed]
        self.num_finished -= len(bucket.finished) - len(kept)
        bucket.finished = kept
        if not bucket:
            del self._buckets[deadline]

    def missed_deadline(self, step: int, num_taken: Mapping[int, int]) -> int | None:
        """Return the first deadline that some group must miss if `step` takes a batch, or None.

        None is missed if for each step x from `step` on, the other groups due by x fit into the steps after `step` up
        to x.

        Args:
            num_taken: deadline -> number of groups that the step takes.
        """
        num_due = 0
        for deadline, bucket in self._buckets.items():
            num_due += len(bucket) - num_taken.get(deadline, 0)
            if num_due > max(0, deadline - step) * self._groups_per_step:
                return deadline
        return None

    def slack(self, deadline: int, step: int) -> int:
        """Return how many groups with this deadline fit beside those in the queue into the steps after `step`."""
        num_due, slack = 0, max(0, deadline - step) * self._groups_per_step
        for due, bucket in self._buckets.items():
            num_due += len(bucket)
            places = (max(due, deadline) - step) * self._groups_per_step
            slack = min(slack, places - num_due)
        return max(0, slack)

    def count_earliest_finished(self, num: int) -> dict[int, int]:
        """Return deadline -> number of groups, of the first `num` finished groups in the queue."""
        counts: dict[int, int] = {}
        for deadline, bucket in self._buckets.items():
            counts[deadline] = min(num, len(bucket.finished))
            num -= counts[deadline]
        return counts

    def are_first_finished(self, num: int) -> bool:
        """Return whether the first `num` groups of the queue are finished."""
        for bucket in self._buckets.values():
            if num < len(bucket):
                first_unfinished = bucket.first_unfinished()
                return num == 0 or (
                    num <= len(bucket.finished)
                    and (first_unfinished is None or bucket.finished[num - 1] < first_unfinished)
                )
            if bucket.unfinished:
                return False
            num -= len(bucket)
        return num == 0

    def earliest_finished(self, num: int) -> list[int]:
        """Return the `num` finished groups that are first in the queue, or all if there are fewer."""
        out: list[int] = []
        for bucket in self._buckets.values():
            if len(out) == num:
                break
            out += bucket.finished[: num - len(out)]
        return out
