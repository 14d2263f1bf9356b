"""The section `limits`: bounds of monitored quantities that warn, skip an update or end the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import override

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


class LimitsConfig(Section):
    """Limits of monitored quantities, none by default. A run that a limit ends has exit code 3."""

    logprob_abs_max: LimitConfig | None = None
    """Largest absolute difference between the trainer's and the engine's log-probability of a sampled token, in nats,
    before the step's first update."""

    kl: LimitConfig | None = None
    """Mean KL divergence per token from the reference model. With `kl_loss` alone it is measured during the update, so
    that `skip` only warns."""

    reward: LimitConfig | None = None
    """Mean reward of a step's completions. A plain number is not accepted: give max or min."""

    grad_norm: LimitConfig | None = None
    """Global norm of each update's gradient before clipping; `skip` skips that update only."""

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
        for key in ("logprob_abs_max", "kl", "grad_norm"):
            limit: LimitConfig | None = getattr(self, key)
            if limit is not None and limit.max is not None and limit.max <= 0:
                raise ValueError(f"{key}.max needs to be above 0, got {limit.max:g}")
        return self
