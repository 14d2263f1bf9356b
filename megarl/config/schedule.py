"""The section `schedule`: how far generation runs ahead of training, and how stale a token may be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.config.rollout import EngineConfig
from megarl.config.section import Section

ScheduleType = Literal["sync", "one_step_off", "async"]

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"lookahead": 0, "max_staleness": 0, "late": "wait", "update": "drain", "adapt_lookahead": False},
    "one_step_off": {"lookahead": 1, "max_staleness": 1, "late": "wait", "update": "drain", "adapt_lookahead": False},
    "async": {"lookahead": 3, "max_staleness": 8, "late": "wait", "update": "retract", "adapt_lookahead": True},
}
"""Settings by type; only `async` accepts others."""


IN_PLACE_ARGUMENTS: Mapping[str, object] = {
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
}
"""Arguments of SGLang that `update: in_place` sets."""

_IN_PLACE_REASONS: Mapping[str, str] = {
    "disable_overlap_schedule": "its scheduler would otherwise count one token of each request to the version after "
    "the one that sampled it",
    "disable_radix_cache": "new requests would otherwise use the KV cache of older weights",
    "chunked_prefill_size": "the KV cache of a prompt would otherwise be of two versions",
}


class ScheduleConfig(Section):
    """When groups are sampled and trained on. Versions count the steps: step t trains with the weights of t - 1."""

    type: ScheduleType = "sync"
    """`sync`: a step samples its batch, then trains on it. `one_step_off`: the next batch is sampled during the
    training of a step, and the push waits for it; steps repeat bitwise. `async`: engines never wait."""

    lookahead: int | None = Field(default=None, ge=0)
    """Number of batches that may be sampled or waiting besides the current one. It determines the mean staleness.
    Default: 3, at most max_staleness. With `sync` 0, with `one_step_off` 1."""

    adapt_lookahead: bool | None = None
    """Whether fewer groups are admitted while finished ones wait and steps do not: as many fewer as wait beyond the
    next batch. Samples are then younger where training is slower than generation. `lookahead` stays the upper bound.
    Default: true. With `sync` and `one_step_off`, false."""

    max_staleness: int | None = Field(default=None, ge=0)
    """No token is trained on that is older than so many versions. At least `lookahead`. Default: 8, at least
    `lookahead`. With `sync` 0, with `one_step_off` 1."""

    late: Literal["wait", "mask", "drop"] | None = None
    """What happens to groups that take longer than `max_staleness` allows. `wait`: steps wait for them in time, and
    nothing is lost. `mask`: steps do not wait, and tokens above the cap leave the loss. `drop`: they are discarded and
    replaced, which favors short completions; for comparisons. Default: `wait`."""

    update: Literal["drain", "retract", "in_place", "abort"] | None = None
    """How weights are pushed while requests run. `drain`: wait until none does. `retract`: pause, and recompute the
    prefixes with the new weights. `in_place`: continue on the KV cache of the old weights; the engines then schedule
    without overlap and cache no prefixes. `abort`: abort the requests, and continue them by new ones that begin with
    the tokens sampled so far. Default: `retract`. With `sync` and `one_step_off`, `drain`."""

    @model_validator(mode="after")
    def _check_type(self) -> ScheduleConfig:
        if self.type == "async":
            return self
        for key, value in _DEFAULTS[self.type].items():
            if getattr(self, key) not in (None, value):
                value, got = (str(setting).lower() for setting in (value, getattr(self, key)))  # as in YAML
                raise ValueError(
                    f"{key} needs to be {value} with type: {self.type}, got {got}; type: async takes other values"
                )
        return self

    @model_validator(mode="after")
    def _check_lookahead(self) -> ScheduleConfig:
        if self.lookahead is not None and self.max_staleness is not None and self.lookahead > self.max_staleness:
            raise ValueError(
                f"lookahead needs to be at most max_staleness, got {self.lookahead} > {self.max_staleness}: the last "
                f"of {self.lookahead + 1} open batches would be {self.lookahead} versions old when its turn comes"
            )
        return self

    def resolved(self) -> ScheduleConfig:
        """Return a copy without None: with the defaults filled in."""
        given = {key: getattr(self, key) for key in _DEFAULTS[self.type] if getattr(self, key) is not None}
        settings = {**_DEFAULTS[self.type], **given}
        if "max_staleness" not in given:
            settings["max_staleness"] = max(settings["lookahead"], settings["max_staleness"])
        settings["lookahead"] = min(settings["lookahead"], settings["max_staleness"])
        return self.model_copy(update=settings)

    def engine_problems(self, engine: EngineConfig) -> Iterator[str]:
        """Yield a sentence for each setting of the engines with which this schedule cannot work."""
        for name, value in IN_PLACE_ARGUMENTS.items() if self.update == "in_place" else ():
            if engine.extra_args.get(name, value) != value:
                yield (
                    f"schedule.update: in_place sets rollout.engine.extra_args.{name}, which needs to be "
                    f"{json.dumps(value)}, got {json.dumps(engine.extra_args[name])}: {_IN_PLACE_REASONS[name]}"
                )
