"""The events of a schedule, as they are logged, and its state, as it is saved and as it is rebuilt after a kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeAlias

from megarl.errors import DataError
from megarl.run.schedule.settings import Late, SchedulePolicy, version_of


class Outcome(StrEnum):
    """How a group ends that is not trained on; another one takes its place."""

    FILTERED = "filtered"
    """The algorithm rejected it, as dynamic sampling does."""
    FAILED = "failed"
    """Its samples or rewards failed."""
    DROPPED = "dropped"
    """It is above the staleness cap (`late: drop`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Groups were sent to the engines."""

    number: int
    """Position of the event in the log, from 1; the same of all events below."""
    version: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All samples of a group are generated and scored."""

    number: int
    ordinal: int
    oldest: int
    """Version of its oldest token, at least that of its admission."""
    newest: int
    """Version of its newest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A group ended without being trained on."""

    number: int
    ordinal: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A step took its batch; the groups count as open until the step's push."""

    number: int
    step: int
    ordinals: tuple[int, ...]
    """Ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The engines have the weights of a step; its batch is trained."""

    number: int
    version: int
    dropped: tuple[int, ...] = ()
    """Groups that are now above the staleness cap (`late: drop`); the engines abort those that are unfinished."""
    skipped: bool = False
    """Whether the step skipped its update: the engines keep the weights and the label of the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group that was admitted, and neither trained on nor removed."""

    ordinal: int
    version: int
    """Version at its admission."""
    attempt: int = 0
    """If it was admitted again, number of that event; it distinguishes its samples from those of the first time."""
    oldest: int | None = None
    """Version of its oldest token; None while it is unfinished."""
    newest: int | None = None
    """Version of its newest token; None while it is unfinished."""

    @property
    def is_finished(self) -> bool:
        """Whether all samples are generated and scored."""
        return self.oldest is not None

    def unfinished(self) -> OpenGroup:
        """Return the group as it was when it was admitted."""
        return OpenGroup(ordinal=self.ordinal, version=self.version, attempt=self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The batch of a step that has not been pushed."""

    step: int
    groups: tuple[OpenGroup, ...]
    """Finished groups, by ascending ordinals."""

    @property
    def ordinals(self) -> tuple[int, ...]:
        """Ordinals of the groups, ascending."""
        return tuple(group.ordinal for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCounts:
    """Groups by how they ended, since the first step."""

    trained: int = 0
    filtered: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleState:
    """State of a schedule; `dataclasses.asdict` makes it JSON-serializable."""

    version: int = 0
    """Version of the last push, which is the number of the last finished step."""
    next_ordinal: int = 0
    """Smallest ordinal that was never admitted."""
    num_events: int = 0
    """Number of the last event in this state; the log continues after it."""
    groups: tuple[OpenGroup, ...] = ()
    """Open groups that are not leased. A resumed run samples the unfinished ones again."""
    leases: tuple[Lease, ...] = ()
    """Batches of the steps after `version`: the current one, or those that a resumed run trains on as logged."""
    counts: ScheduleCounts = field(default_factory=ScheduleCounts)
    skipped: tuple[int, ...] = ()
    """Ascending versions without an update of their own, as far as tokens to be trained on may have their weights; also
    those of `leases`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run resumed from a checkpoint and the log."""

    number: int
    state: ScheduleState
    """What it resumed from, whatever the log says before this event."""


ScheduleEvent: TypeAlias = Admitted | Finished | Removed | Leased | Pushed | Resumed

_TYPES: Mapping[str, type[ScheduleEvent]] = {
    "admitted": Admitted,
    "finished": Finished,
    "removed": Removed,
    "leased": Leased,
    "pushed": Pushed,
    "resumed": Resumed,
}


def encode_event(event: ScheduleEvent) -> dict[str, Any]:
    """Return the event as a JSON object: its fields, and its type as `event`."""
    return {"event": type(event).__name__.lower(), **asdict(event)}


def decode_event(content: Mapping[str, Any]) -> ScheduleEvent:
    """Return the event that `encode_event` has encoded.

    A missing field has its default: other versions of megarl may have written the event.

    Raises:
        DataError: the object is not an event.
    """
    values = dict(content)
    name = values.pop("event", None)
    event_type = _TYPES.get(name) if isinstance(name, str) else None
    if event_type is None:
        raise DataError(f"a schedule event needs one of the types {', '.join(_TYPES)}, got {name!r}")
    required = {f.name for f in fields(event_type) if f.default is MISSING}
    if not required <= values.keys() <= {f.name for f in fields(event_type)}:
        raise DataError(
            f"a schedule event {name!r} needs the fields {', '.join(sorted(required))}, got "
            f"{', '.join(sorted(values)) or 'none'}"
        )
    for key, value in values.items():
        if isinstance(value, list):
            values[key] = tuple(value)
    if "outcome" in values:
        values["outcome"] = Outcome(values["outcome"])
    if "state" in values:
        values["state"] = _decode_state(values["state"])
    return event_type(**values)


def _decode_state(content: Mapping[str, Any]) -> ScheduleState:
    leases = [
        Lease(step=lease["step"], groups=tuple(OpenGroup(**group) for group in lease["groups"]))
        for lease in content["leases"]
    ]
    return ScheduleState(
        **{
            **content,
            "groups": tuple(OpenGroup(**group) for group in content["groups"]),
            "leases": tuple(leases),
            "counts": ScheduleCounts(**content["counts"]),
            "skipped": tuple(content.get("skipped", ())),
        }
    )


@dataclass(frozen=True, slots=True)
class TokenVersions:
    """Versions of the tokens of a finished group, as the engines label them."""

    oldest: int
    newest: int


class LogMismatchError(DataError):
    """The log does not continue the state of the checkpoint: events that both need are missing."""


def recover(
    state: ScheduleState, log: Iterable[ScheduleEvent], finished: Mapping[int, TokenVersions] | None = None
) -> ScheduleState:
    """Return the state from which a run resumes: the version of `state`, and what the log says came after it.

    Batches that were leased after `state` are trained again as logged. Groups that were finished are kept, the others
    are sampled again. Every ordinal below `next_ordinal` is open, leased, trained or removed, as it was.

    Args:
        state: of the checkpoint.
        log: events in the order in which they were written; those before `state` are ignored. Its end may be missing.
        finished: versions of the groups whose trajectories can be read; None: of all that the log calls finished. They
            count for groups that the log does not call finished. A batch with a group that cannot be read is void, and
            so is what came after it: its groups are open again, and groups with tokens of voided versions are sampled
            again.

    Raises:
        LogMismatchError: the log does not continue `state`.
    """
    replay = _Replay(state)
    for event in log:
        if event.number > state.num_events:
            replay.apply(event)
    if finished is not None:
        replay.use_readable(finished)
    return replay.state()


def split_open_groups(
    policy: SchedulePolicy, groups_per_step: int, state: ScheduleState
) -> tuple[list[OpenGroup], list[OpenGroup]]:
    """Return the open groups that a resumed run keeps, and those that it samples again, by ascending ordinal.

    It keeps finished groups that can meet their deadlines under `policy` after the batches in `state.leases`.
    """
    version = max((lease.step for lease in state.leases), default=state.version)
    kept: list[OpenGroup] = []
    again: list[OpenGroup] = []
    for group in sorted(state.groups, key=lambda group: (group.version, group.ordinal)):
        num_steps = policy.deadline(group.version) - version
        fits = {
            Late.WAIT: len(kept) < num_steps * groups_per_step,
            Late.DROP: num_steps > 0,
            Late.MASK: True,
        }[policy.late]
        if group.is_finished and fits:
            kept.append(group)
        else:
            again.append(group.unfinished())
    return kept, sorted(again, key=lambda group: group.ordinal)


class _Replay:
    """Applies logged events to a state, without training."""

    def __init__(self, state: ScheduleState) -> None:
        self._start = state
        self._groups = {group.ordinal: group for group in state.groups}
        self._leases = {lease.step: lease for lease in state.leases}
        self._next_ordinal, self._num_events = state.next_ordinal, state.num_events
        self._counts = state.counts
        self._skipped = set(state.skipped)

    def apply(self, event: ScheduleEvent) -> None:
        is_first = self._num_events == self._start.num_events
        if is_first and event.number != self._num_events + 1 and not isinstance(event, Resumed):
            raise _damaged(event, f"event {self._num_events + 1} is missing")
        self._num_events = event.number
        match event:
            case Admitted():
                for ordinal in event.ordinals:
                    self._groups.pop(ordinal, None)
                    attempt = event.number if ordinal < self._next_ordinal else 0
                    self._groups[ordinal] = OpenGroup(ordinal=ordinal, version=event.version, attempt=attempt)
                    self._next_ordinal = max(self._next_ordinal, ordinal + 1)
            case Finished():
                group = self._open_group(event.ordinal, event)
                self._groups[event.ordinal] = replace(group, oldest=event.oldest, newest=event.newest)
            case Removed():
                self._remove(event.ordinal, event.outcome.value, event)
            case Leased():
                self._lease(event)
            case Pushed():
                if event.skipped:
                    self._skipped.add(event.version)
                for ordinal in event.dropped:
                    self._remove(ordinal, "dropped", event)
            case Resumed():
                self._resume(event)

    def use_readable(self, finished: Mapping[int, TokenVersions]) -> None:
        """Count the groups of `finished` as finished, and no others."""
        for step in sorted(self._leases):
            if any(ordinal not in finished for ordinal in self._leases[step].ordinals):
                self._void(step)
                break
        for ordinal, group in self._groups.items():
            labels = finished.get(ordinal)
            if labels is None:
                self._groups[ordinal] = group.unfinished()
            elif not group.is_finished:
                oldest, newest = (version_of(label, self._skipped) for label in (labels.oldest, labels.newest))
                # otherwise, a lost part of the log had its admission or its last version
                if group.version <= oldest and newest <= self._last_step:
                    self._groups[ordinal] = replace(group, oldest=oldest, newest=newest)

    def state(self) -> ScheduleState:
        return replace(
            self._start,
            next_ordinal=self._next_ordinal,
            num_events=self._num_events,
            groups=tuple(self._groups.values()),
            leases=tuple(self._leases[step] for step in sorted(self._leases)),
            counts=self._counts,
            skipped=tuple(sorted(self._skipped)),
        )

    @property
    def _last_step(self) -> int:
        return max(self._leases, default=self._start.version)

    def _lease(self, event: Leased) -> None:
        known = self._leases.get(event.step)
        if known is not None and known.ordinals == event.ordinals:  # trained again as logged
            return
        if event.step != self._last_step + 1:
            raise _damaged(event, f"the batch of step {event.step} follows that of step {self._last_step}")
        groups = [self._open_group(ordinal, event) for ordinal in event.ordinals]
        if not all(group.is_finished for group in groups):
            raise _damaged(event, f"the batch of step {event.step} has unfinished groups")
        for group in groups:
            del self._groups[group.ordinal]
        self._leases[event.step] = Lease(step=event.step, groups=tuple(groups))

    def _resume(self, event: Resumed) -> None:
        """Take over a state that was computed here, of an earlier run of the same checkpoint or of a later one."""
        state = event.state
        trained = [lease for step, lease in self._leases.items() if step <= state.version]
        if len(trained) < state.version - self._start.version:
            raise _damaged(event, f"the batch of a step up to {state.version} is missing")
        self._leases = {lease.step: lease for lease in (*trained, *state.leases)}
        self._groups = {group.ordinal: group for group in state.groups}
        self._next_ordinal = state.next_ordinal
        self._skipped = set(state.skipped)
        self._counts = replace(state.counts, trained=self._start.counts.trained)

    def _void(self, first_step: int) -> None:
        """Return the batches from `first_step` on; samples of their versions are no samples of this run any more."""
        voided = [step for step in self._leases if step >= first_step]
        if not voided:
            return
        self._skipped = {version for version in self._skipped if version < first_step}
        for step in voided:
            self._groups.update({group.ordinal: group for group in self._leases.pop(step).groups})
        for ordinal, group in self._groups.items():
            if group.newest is not None and group.newest >= first_step:
                self._groups[ordinal] = group.unfinished()

    def _remove(self, ordinal: int, outcome: str, event: ScheduleEvent) -> None:
        self._open_group(ordinal, event)
        del self._groups[ordinal]
        self._counts = replace(self._counts, **{outcome: getattr(self._counts, outcome) + 1})

    def _open_group(self, ordinal: int, event: ScheduleEvent) -> OpenGroup:
        group = self._groups.get(ordinal)
        if group is None:
            raise _damaged(event, f"group {ordinal} is not open")
        return group


def _damaged(event: ScheduleEvent, reason: str) -> LogMismatchError:
    return LogMismatchError(
        f"the log of the schedule does not continue the checkpoint: event {event.number} "
        f"({type(event).__name__.lower()}): {reason}"
    )
