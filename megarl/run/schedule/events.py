"""The events of a schedule, as they are logged, and its state, as it is saved with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

from megarl.errors import DataError


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
