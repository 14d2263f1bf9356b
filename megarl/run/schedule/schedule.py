"""The state machine of a schedule: which groups are sent to the engines, and which ones a step trains on.

    admit --> unfinished --finish--> finished --lease--> leased --push--> trained
                  |                     |
                  '---- remove, drop ---'----> filtered, failed, dropped (and another group is admitted)

Two rules, with L = `lookahead`, eta = `max_staleness` and B groups per step:

- Gate: at most (L + 1) * B groups are open. A leased batch counts as B open groups until its push.
- Deadline: a group admitted at version a is trained by step a + eta + 1. A step takes the B finished groups with the
  earliest deadlines if, for every later step x, the other groups due by x fit into the steps up to x; else it waits.

By the second rule no trained token is more than eta versions old. By the first one, and L <= eta, a step that waits
continues once its groups finish.

With `adapt_lookahead`, finished groups count twice in the gate, but for B of them, those of a leased batch first: fewer
groups are admitted while training is slower than generation. A batch is then finished already, and the groups that it
may have to wait for are admitted. This ends for some steps when a step had to wait: finished groups then pile up
because of slow ones that must be trained first, and the engines have no time to lose.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, islice

from megarl.run.schedule.events import (
    Admitted,
    Finished,
    Lease,
    Leased,
    OpenGroup,
    Outcome,
    Pushed,
    Removed,
    Resumed,
    ScheduleState,
    split_open_groups,
)
from megarl.run.schedule.settings import Late, SchedulePolicy, Update, label_of, version_of


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


_EMPTY = ScheduleState()

WAIT_FREE_STEPS = 8
"""With `adapt_lookahead`, number of steps without a wait after which finished groups take up places.

With fewer, engines run dry between the waits for the slowest groups; with more, the lookahead adapts later.
"""


class Schedule:
    """A schedule in progress. Its methods are its events: each returns the entry of the log, to be written at once.

    Versions and steps share their numbers: step t trains with the weights of version t - 1 and pushes version t, also
    if it skips the update; tokens that the engines label with the version before then count as of version t, too.
    Ordinals number the groups in the order of the prompts.

    Examples:
        >>> schedule = Schedule(SchedulePolicy(lookahead=1, max_staleness=1), groups_per_step=2)
        >>> schedule.admit(schedule.capacity).ordinals
        (0, 1, 2, 3)
        >>> for ordinal in (1, 3):
        ...     _ = schedule.finish(ordinal)
        >>> schedule.pick()  # 2 and 0 may be trained in step 2
        (1, 3)
        >>> _ = schedule.lease((1, 3))
        >>> schedule.capacity  # the leased batch counts until its push
        0
        >>> schedule.push().version, schedule.capacity
        (1, 2)
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        groups_per_step: int,
        *,
        num_steps: int | None = None,
        state: ScheduleState = _EMPTY,
    ) -> None:
        """Start a schedule, or resume one.

        A resumed schedule takes the batches in `state.leases` first. It keeps finished groups that can meet their
        deadlines under this policy, and admits the others again: each at the version of its first admission while
        logged batches are trained, all within the gate afterwards.

        Args:
            groups_per_step: B, the number of groups in a batch.
            num_steps: number of the last step; groups that it would leave over are not admitted. None: endless.
            state: of a checkpoint, or of `recover`.
        """
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step needs to be at least 1, got {groups_per_step}")
        self.policy, self.groups_per_step, self.num_steps = policy, groups_per_step, num_steps
        self._version, self._next_ordinal = state.version, state.next_ordinal
        self._num_events = state.num_events
        self._outcomes = Counter({Outcome(name): num for name, num in _removed(state).items()})
        self._num_trained = state.counts.trained
        self._logged = deque(state.leases)
        self._lease: Lease | None = None
        self._groups: dict[int, OpenGroup] = {}
        self._queue = DeadlineQueue(groups_per_step)
        self._again: dict[int, OpenGroup] = {}
        """Groups to admit again, by ascending ordinal."""
        self._again_later: dict[int, OpenGroup] = {}
        """Groups to admit again once a logged batch of the version that sampled them first is trained."""
        self._first_step = max((lease.step for lease in state.leases), default=state.version) + 1
        """First step whose batch is not logged: it has to wait with any lookahead."""
        self._last_wait = self._first_step - 1 - WAIT_FREE_STEPS
        """Last step that had to wait for its batch, apart from the first one."""
        self._skipped = {version for version in state.skipped if version <= state.version}
        """Versions whose update was skipped, down to the oldest of tokens that may be trained on."""
        kept, again = split_open_groups(policy, groups_per_step, state)
        for group in kept:
            self._add(group.unfinished())
            self._groups[group.ordinal] = group
            self._queue.finish(group.ordinal, policy.deadline(group.version))
        self._again_later.update((group.ordinal, group) for group in again)
        self._release_again()

    @property
    def version(self) -> int:
        """Version of the last push: the number of finished steps."""
        return self._version

    @property
    def step(self) -> int:
        """Number of the current step: the one whose batch is leased, or will be next."""
        return self._version + 1

    @property
    def is_replaying(self) -> bool:
        """Whether the next batch is one of the log; no other group is admitted before all of them are trained."""
        return bool(self._logged)

    @property
    def leased(self) -> tuple[int, ...] | None:
        """Ordinals of the leased batch; None between a push and the next lease."""
        return None if self._lease is None else self._lease.ordinals

    @property
    def num_unfinished(self) -> int:
        """Number of groups that the engines and rewards are working on."""
        return self._queue.num_unfinished

    @property
    def num_finished(self) -> int:
        """Number of finished groups that are not leased."""
        return self._queue.num_finished

    @property
    def capacity(self) -> int:
        """Number of groups that may be admitted now."""
        if self._logged:
            if self.policy.late is not Late.WAIT:
                return len(self._again)
            return min(len(self._again), self._queue.slack(self.policy.deadline(self._version), self._logged[-1].step))
        num_batches = self.policy.lookahead + 1
        if self.num_steps is not None:
            num_batches = max(0, min(num_batches, self.num_steps - self._version))
        num_leased = 0 if self._lease is None else self.groups_per_step
        return max(0, num_batches * self.groups_per_step - len(self._queue) - num_leased - self._num_waiting)

    @property
    def _num_waiting(self) -> int:
        """Number of finished groups beyond a batch that take up places, with `adapt_lookahead`."""
        has_waited = self._last_wait > self._version - WAIT_FREE_STEPS
        if not self.policy.adapt_lookahead or has_waited:
            return 0
        num_leased = 0 if self._lease is None else self.groups_per_step
        return max(0, self._queue.num_finished + num_leased - self.groups_per_step)

    @property
    def lookahead(self) -> float:
        """Number of batches that may be open besides the current one: `policy.lookahead`, or less if it adapts."""
        return max(0.0, self.policy.lookahead - self._num_waiting / self.groups_per_step)

    def upcoming(self, num: int) -> list[int]:
        """Return the ordinals of the next `num` groups: those to be sampled again, then new ones."""
        again = list(islice(self._again, num))
        return again + list(range(self._next_ordinal, self._next_ordinal + num - len(again)))

    def is_unfinished(self, ordinal: int) -> bool:
        """Return whether a result of this group is expected; if not, it is late or a duplicate."""
        group = self._groups.get(ordinal)
        return group is not None and not group.is_finished

    def open_group(self, ordinal: int) -> OpenGroup:
        """Return a group that is admitted, and neither leased nor removed."""
        return self._groups[ordinal]

    def finished(self) -> list[OpenGroup]:
        """Return the finished groups that are not leased; a resumed run fetches these from its journal."""
        return [group for group in self._groups.values() if group.is_finished]

    def pick(self) -> tuple[int, ...] | None:
        """Return the batch of the current step in the order of the ordinals, or None while the step has to wait."""
        if self._lease is not None:
            return None
        if self._logged:
            return self._logged[0].ordinals
        if self._queue.num_finished < self.groups_per_step or self._is_blocked():
            return None
        return tuple(sorted(self._queue.earliest_finished(self.groups_per_step)))

    def mark_waiting(self) -> None:
        """Note that the current step has to wait for its batch: `pick` has returned None."""
        if self.step > self._first_step:
            self._last_wait = self.step

    def pick_fewer(self) -> tuple[int, ...] | None:
        """Return at most a batch of the finished groups once none is unfinished, else None; there may be no group.

        For steps that settle for fewer groups.
        """
        if self._lease is not None or self.num_unfinished:
            return None
        return tuple(sorted(self._queue.earliest_finished(self.groups_per_step)))

    def _is_blocked(self) -> bool:
        """Whether a full batch of finished groups has to wait for others."""
        if self.policy.in_order:
            has_earlier = bool(self._again) and self.capacity > 0
            return has_earlier or not self._queue.are_first_finished(self.groups_per_step)
        return self.overdue_step is not None

    @property
    def overdue_step(self) -> int | None:
        """The first step by which some group must be trained and could not, if the batch were taken now; else None."""
        return self._missed_deadline(self._queue.count_earliest_finished(self.groups_per_step))

    def _missed_deadline(self, num_taken: Mapping[int, int]) -> int | None:
        return self._queue.missed_deadline(self.step, num_taken) if self.policy.late is Late.WAIT else None

    @property
    def can_push(self) -> bool:
        """Whether the leased batch may be pushed once it is trained: with `update: drain`, no group is unfinished."""
        return self._lease is not None and not (self.policy.update is Update.DRAIN and self._queue.num_unfinished)

    def group_staleness(self) -> Counter[int]:
        """Return staleness -> number of groups in the leased batch, by the oldest token of each."""
        groups = () if self._lease is None else self._lease.groups
        return Counter(self._version - group.oldest for group in groups if group.oldest is not None)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the leased batch and of the open groups."""
        staleness = self.group_staleness()
        num = staleness.total()
        return {
            "schedule/unfinished": self._queue.num_unfinished,
            "schedule/finished": self._queue.num_finished,
            **({"schedule/staleness_mean": sum(s * n for s, n in staleness.items()) / num} if num else {}),
            **({"schedule/staleness_max": max(staleness)} if num else {}),
            **{f"schedule/{outcome.value}": self._outcomes[outcome] for outcome in Outcome},
        }

    def state(self) -> ScheduleState:
        """Return the state to save with a checkpoint."""
        leases = ([] if self._lease is None else [self._lease]) + list(self._logged)
        counts = {outcome.value: self._outcomes[outcome] for outcome in Outcome}
        return ScheduleState(
            version=self._version,
            next_ordinal=self._next_ordinal,
            num_events=self._num_events,
            groups=(*self._groups.values(), *self._again.values(), *self._again_later.values()),
            leases=tuple(leases),
            counts=replace(_EMPTY.counts, trained=self._num_trained, **counts),
            skipped=tuple(sorted(self._skipped)),
        )

    def admit(self, num: int) -> Admitted:
        """Admit the `num` groups that `upcoming` returns.

        Raises:
            ValueError: more than `capacity`.
        """
        if num > self.capacity:
            raise ValueError(f"{num} groups cannot be admitted: the capacity is {self.capacity}")
        ordinals, number = self.upcoming(num), self._count_event()
        for ordinal in ordinals:
            self._again.pop(ordinal, None)
            attempt = number if ordinal < self._next_ordinal else 0
            self._add(OpenGroup(ordinal=ordinal, version=self._version, attempt=attempt))
        self._next_ordinal = max([self._next_ordinal, *(ordinal + 1 for ordinal in ordinals)])
        return Admitted(number=number, version=self._version, ordinals=tuple(ordinals))

    def finish(self, ordinal: int, *, oldest: int | None = None, newest: int | None = None) -> Finished:
        """Mark a group as finished.

        Args:
            oldest: version of its oldest token; default: that of its admission.
            newest: version of its newest token; default: the current one.

        Raises:
            ValueError: the group is not unfinished, or a token is older than its admission.
        """
        if not self.is_unfinished(ordinal):
            raise ValueError(f"group {ordinal} cannot finish: it is not unfinished")
        group = self._groups[ordinal]
        oldest = group.version if oldest is None else oldest
        newest = self._version if newest is None else newest
        if oldest < group.version:
            raise ValueError(
                f"group {ordinal} was admitted at version {group.version}, but version {oldest} has sampled a token"
            )
        self._groups[ordinal] = replace(group, oldest=oldest, newest=newest)
        self._queue.finish(ordinal, self.policy.deadline(group.version))
        return Finished(number=self._count_event(), ordinal=ordinal, oldest=oldest, newest=newest)

    def remove(self, ordinal: int, outcome: Outcome) -> Removed:
        """Remove a group, finished or not, that is not trained on; another one may be admitted instead.

        Raises:
            ValueError: the group is leased or not open.
        """
        if ordinal not in self._groups:
            raise ValueError(f"group {ordinal} cannot be removed: it is not open")
        self._discard(ordinal, outcome)
        return Removed(number=self._count_event(), ordinal=ordinal, outcome=outcome)

    def lease(self, ordinals: Iterable[int]) -> Leased:
        """Take the batch of the current step: that of `pick`, or fewer groups where an algorithm settles for them.

        Raises:
            ValueError: a batch is leased already, a group is not finished, the log has another batch, or another group
                could not meet its deadline.
        """
        ordinals = tuple(sorted(ordinals))
        if self._lease is not None:
            raise ValueError(f"step {self.step} has a batch already")
        if self._logged:
            if ordinals != self._logged[0].ordinals:
                raise ValueError(f"step {self.step} trained on groups {self._logged[0].ordinals}, now on {ordinals}")
            self._lease = self._logged.popleft()
            self._release_again()
            return Leased(number=self._count_event(), step=self.step, ordinals=ordinals)
        groups = [group for ordinal in ordinals if (group := self._groups.get(ordinal)) and group.is_finished]
        if len(groups) < len(ordinals):
            raise ValueError(f"step {self.step} cannot train on {ordinals}: some of these groups are not finished")
        by_deadline: dict[int, list[int]] = {}
        for group in groups:
            by_deadline.setdefault(self.policy.deadline(group.version), []).append(group.ordinal)
        missed = self._missed_deadline({deadline: len(members) for deadline, members in by_deadline.items()})
        if missed is not None:
            raise ValueError(f"step {self.step} cannot train on {ordinals}: groups due by {missed} would be late")
        for deadline, members in by_deadline.items():
            self._queue.remove_finished(members, deadline)
        for ordinal in ordinals:
            del self._groups[ordinal]
        self._lease = Lease(step=self.step, groups=tuple(groups))
        return Leased(number=self._count_event(), step=self.step, ordinals=ordinals)

    def push(self, *, drained: bool = True, skipped: bool = False) -> Pushed:
        """End the current step: its batch is trained, and the engines have its weights.

        Args:
            skipped: the update was skipped, so that the engines' weights and labels stay those of the version before.
            drained: False: an engine was lost, so that unfinished groups continue with the new weights, whatever
                `update` says.

        Raises:
            ValueError: no batch is leased, or `can_push` is false.
        """
        if self._lease is None or (drained and not self.can_push):
            raise ValueError(f"step {self.step} cannot be pushed: {self._why_not()}")
        self._num_trained += len(self._lease.groups)
        self._version, self._lease = self._lease.step, None
        self._release_again()
        self._count_skipped([self._version] if skipped else [])
        dropped = self._expired() if self.policy.late is Late.DROP and not self._logged else ()
        for ordinal in dropped:
            self._discard(ordinal, Outcome.DROPPED)
        return Pushed(number=self._count_event(), version=self._version, dropped=dropped, skipped=skipped)

    def resume(self) -> Resumed:
        """Return the entry that a resumed run writes to the log before any other."""
        return Resumed(number=self._count_event(), state=self.state())

    def set_label(self, label: int) -> None:
        """Set what the engines label tokens with, where the state does not have the updates skipped before it."""
        self._count_skipped(range(label + 1, self._version + 1))

    def version_of(self, label: int) -> int:
        """Return the version that tokens count as which the engines have labelled `label`."""
        return version_of(label, self._skipped)

    @property
    def oldest_label(self) -> int:
        """The oldest label of tokens that the current step may train on."""
        return label_of(self.policy.oldest_version(self.step), self._skipped)

    def _count_skipped(self, versions: Iterable[int]) -> None:
        """Add skipped versions, and forget those before the open groups and the cap."""
        self._skipped.update(versions)
        if not self._skipped:
            return
        leased = (group for lease in self._logged for group in lease.groups)
        groups = chain(self._groups.values(), self._again.values(), self._again_later.values(), leased)
        oldest = min([self.policy.oldest_version(self.step), *(group.version for group in groups)])
        oldest_label = label_of(oldest, self._skipped)
        self._skipped = {version for version in self._skipped if version > oldest_label}

    def _why_not(self) -> str:
        return "no batch is leased" if self._lease is None else f"{self.num_unfinished} groups are unfinished"

    def _count_event(self) -> int:
        self._num_events += 1
        return self._num_events

    def _add(self, group: OpenGroup) -> None:
        self._groups[group.ordinal] = group
        self._queue.add(group.ordinal, self.policy.deadline(group.version))

    def _release_again(self) -> None:
        """Let those groups be admitted again whose turn has come."""
        due = [o for o, group in self._again_later.items() if not self._logged or group.version <= self._version]
        if due:
            self._again |= {ordinal: self._again_later.pop(ordinal) for ordinal in due}
            self._again = dict(sorted(self._again.items()))

    def _discard(self, ordinal: int, outcome: Outcome) -> None:
        group = self._groups.pop(ordinal)
        self._queue.remove(ordinal, self.policy.deadline(group.version))
        self._outcomes[outcome] += 1

    def _expired(self) -> tuple[int, ...]:
        return tuple(g.ordinal for g in self._groups.values() if self.policy.deadline(g.version) < self.step)


def place(ordinal: int, groups_per_step: int) -> tuple[int, int]:
    """Return the (step, index) that names a group in request ids, seeds and the journal.

    In `sync` without removed groups, these are the step that trains on it and its index in the batch.
    """
    step, index = divmod(ordinal, groups_per_step)
    return step + 1, index


def _removed(state: ScheduleState) -> dict[str, int]:
    return {outcome.value: getattr(state.counts, outcome.value) for outcome in Outcome}
