"""The section `limits`: bounds of monitored quantities that warn, skip an update or end the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, override

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from megarl.config.section import Section


class LimitConfig(Section):
    """Bounds of a monitored quantity; NaN violates them. A plain number stands for `max`, with the action `stop`."""

    max: float | None = None
    """Largest allowed value. Default: no upper bound."""

    min: float | None = None
    """Smallest allowed value. Default: no lower bound."""

    action: Literal["warn", "skip", "stop"] = "stop"
    """What a violation does: log a warning, skip the policy update, or end the run with exit code 3."""

    @model_validator(mode="before")
    @classmethod
    def _accept_number(cls, data: object) -> object:
        return {"max": data} if isinstance(data, int | float) and not isinstance(data, bool) else data

    @model_validator(mode="after")
    def _check_bounds(self) -> LimitConfig:
        if self.max is None and self.min is None:
            raise ValueError("a limit needs max or min")
        if self.max is not None and self.min is not None and self.min >= self.max:
            raise ValueError(f"min needs to be below max, got {self.min:g} >= {self.max:g}")
        return self

    @classmethod
    @override
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        section = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [section, {"type": "number"}], "description": section["description"]}

    def violation(self, key: str, metric: str, value: float) -> str | None:
        """Return `<metric> = <value> passed limits.<key> = <bound>`, or None where the value is within the bounds."""
        # written so that NaN violates the bound
        if self.max is not None and not value <= self.max:
            return f"{metric} = {value:.3g} passed limits.{key} = {self.max:g}"
        if self.min is not None and not value >= self.min:
            return f"{metric} = {value:.3g} passed limits.{key}.min = {self.min:g}"
        return None


REFERENCE_STEPS = 32
"""Number of past steps that a limit which is `auto` refers to."""

MIN_REFERENCE_STEPS = 8
"""Number of steps without which there is no such reference."""

TIMES_LARGEST = 4.0
"""A step's mismatch is healthy below this multiple of the largest before. One tensor of an engine multiplied by 1.25
gives at least 7 times the largest healthy value of the demo in bfloat16, unless a norm undoes the factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLimit:
    """Limit by default of a statistic of |trainer - engine| log-probabilities, relative to the run's own steps."""

    healthy: tuple[float, float]
    """Smallest and largest value of a step of the demo."""
    floor: float
    """Values up to this one are harmless, whatever the steps before had."""
    limit: float
    """Largest value of any step."""

    def bound(self, passed: Sequence[float]) -> float:
        """Return the bound of a step after steps with the values `passed`, oldest first.

        It is four times the largest of the last 32 values, between `floor` and `limit`; `limit` while there are fewer
        than eight values.
        """
        if len(passed) < MIN_REFERENCE_STEPS:
            return self.limit
        return min(max(TIMES_LARGEST * max(passed[-REFERENCE_STEPS:]), self.floor), self.limit)


AUTO_LIMITS: Mapping[str, Mapping[str, AutoLimit]] = {
    "float32": {
        "logprob_kl": AutoLimit(healthy=(3.6e-9, 7.7e-9), floor=1e-6, limit=1e-5),
        "logprob_abs_p99": AutoLimit(healthy=(8.3e-7, 1.4e-6), floor=1e-4, limit=1e-3),
    },
    "bfloat16": {
        "logprob_kl": AutoLimit(healthy=(6.3e-8, 9.6e-6), floor=1e-5, limit=1e-2),
        "logprob_abs_p99": AutoLimit(healthy=(2.8e-4, 0.03), floor=0.05, limit=1.0),
    },
}
"""By dtype, the limits that are `auto`."""

Auto = Literal["auto"]


def describe_healthy(key: str, dtype: str) -> str:
    """Return the values of a limit's statistic in the demo; empty if they were not measured."""
    known = AUTO_LIMITS[dtype].get(key)
    return "" if known is None else f"{known.healthy[0]:g} to {known.healthy[1]:g} in {dtype} in the demo"


def describe_auto(key: str, dtype: str) -> str:
    """Return the rule of a limit that is `auto`, in words."""
    known = AUTO_LIMITS[dtype][key]
    return (
        f"{TIMES_LARGEST:g} x the largest of the last {REFERENCE_STEPS} steps, from {known.floor:g} to "
        f"{known.limit:g}; {known.limit:g} in the first {MIN_REFERENCE_STEPS} steps"
    )


class LimitsConfig(Section):
    """Limits of monitored quantities. A run that a limit ends has exit code 3."""

    logprob_kl: LimitConfig | Auto | None = "auto"
    """KL divergence of the engine's distribution from the trainer's, mean over the sampled tokens before the step's
    first update, estimated with k3. `auto`: four times the largest value of the last 32 steps,
    between 1e-6 and 1e-5 in float32 and between 1e-5 and 0.01 in bfloat16."""

    logprob_abs_p99: LimitConfig | Auto | None = "auto"
    """99 % quantile of the absolute difference between the trainer's and the engine's log-probability of the sampled
    tokens, in nats, before the step's first update. `auto`: likewise, between 1e-4 and 0.001 in float32 and between
    0.05 and 1 in bfloat16."""

    logprob_abs_max: LimitConfig | None = None
    """Largest of these differences. It grows with the number of tokens: set it for small batches only."""

    kl: LimitConfig | None = None
    """Mean KL divergence per token from the reference model. With `kl_loss` alone it is measured during the update, so
    that `skip` only warns."""

    reward: LimitConfig | None = None
    """Mean reward of a step's completions. A plain number is not accepted: give max or min."""

    grad_norm: LimitConfig | None = None
    """Global norm of each update's gradient before clipping; `skip` skips that update only."""

    missing_routes: LimitConfig | None = LimitConfig(max=0.01, action="warn")
    """With `trainer.moe.router_replay: R3`: share of tokens without a route of the engines among those that a trained
    token depends on. The trainer's routers choose the experts of such tokens. It is known after the update: the action
    `skip` is not accepted."""

    not_finite: Literal["skip", "stop"] = "stop"
    """What to do with an update whose loss or gradient is NaN or infinite: skip it, or end the run."""

    max_skips_in_a_row: int = Field(default=3, ge=0)
    """Number of consecutive steps that may be skipped; the next skipped step ends the run."""

    @model_validator(mode="before")
    @classmethod
    def _check_reward_limit(cls, data: object) -> object:
        reward = data.get("reward") if isinstance(data, dict) else None
        if isinstance(reward, int | float) and not isinstance(reward, bool):
            raise ValueError(f"reward needs max or min, as in {{min: {reward:g}}}, got {reward:g}")  # noqa: TRY004 -- pydantic's
        return data

    @model_validator(mode="after")
    def _check_positive_limits(self) -> LimitsConfig:
        for key in ("logprob_kl", "logprob_abs_p99", "logprob_abs_max", "kl", "grad_norm"):
            limit: LimitConfig | Auto | None = getattr(self, key)
            if isinstance(limit, LimitConfig) and limit.max is not None and limit.max <= 0:
                raise ValueError(f"{key}.max needs to be above 0, got {limit.max:g}")
        return self

    @model_validator(mode="after")
    def _check_missing_routes(self) -> LimitsConfig:
        if self.missing_routes is not None and self.missing_routes.action == "skip":
            raise ValueError("missing_routes.action needs to be warn or stop, as the step has been trained, got skip")
        return self

    def resolved(self, dtype: str) -> LimitsConfig:
        """Return a copy in which each limit that is `auto` is its largest value; `dtype`: float32 or bfloat16."""
        limits = {key: LimitConfig(max=known.limit) for key, known in AUTO_LIMITS[dtype].items()}
        return self.model_copy(update={key: limit for key, limit in limits.items() if getattr(self, key) == "auto"})

    @property
    def auto_keys(self) -> tuple[str, ...]:
        """The keys of the limits that are `auto`."""
        return tuple(key for key in ("logprob_kl", "logprob_abs_p99") if getattr(self, key) == "auto")

    @property
    def mismatch(self) -> dict[str, LimitConfig]:
        """The limits of the difference between trainer and engines, by key; those that are `auto` are not included."""
        limits = {key: getattr(self, key) for key in ("logprob_kl", "logprob_abs_p99", "logprob_abs_max")}
        return {key: limit for key, limit in limits.items() if isinstance(limit, LimitConfig)}
