from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.config.section import Section


class LimitConfig(Section):
    """Bounds of a watched number, which NaN passes too. A number alone is `max`, with the action `stop`."""

    max: float | None = None
    min: float | None = None

    action: Literal["warn", "skip", "stop"] = "stop"
    """What becomes of a step that passes it: it is told of, it leaves the policy as it is, or it ends the run."""

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, data: Any) -> Any:
        return {"max": data} if isinstance(data, int | float) and not isinstance(data, bool) else data

    @model_validator(mode="after")
    def _bounds_something(self) -> LimitConfig:
        if self.max is None and self.min is None:
            raise ValueError("a limit needs max or min")
        if self.max is not None and self.min is not None and self.min >= self.max:
            raise ValueError(f"min needs to be below max, got {self.min:g} >= {self.max:g}")
        return self

    def refusal(self, key: str, metric: str, value: float) -> str | None:
        """`<metric> = <value> passed limits.<key> = <bound>`, or None where it did not."""
        # written so that a NaN passes
        if self.max is not None and not value <= self.max:
            return f"{metric} = {value:.3g} passed limits.{key} = {self.max:g}"
        if self.min is not None and not value >= self.min:
            return f"{metric} = {value:.3g} passed limits.{key}.min = {self.min:g}"
        return None


class LimitsConfig(Section):
    """Watched numbers. A run that one of them ends has exit code 3. Default: none is limited."""

    logprob_abs_max: LimitConfig | None = None
    """Largest |trainer - engine| log-probability of any sampled token, before the step's first update."""

    kl: LimitConfig | None = None
    """The mean over tokens of the divergence from the reference. Measured by the penalty in the loss it is known only
    after the update: `skip` is then no more than `warn`."""

    reward: LimitConfig | None = None
    """Mean reward of the step's completions."""

    grad_norm: LimitConfig | None = None
    """Of each update's gradient before clipping; `skip` leaves that update out."""

    not_finite: Literal["skip", "stop"] = "stop"
    """What becomes of an update whose loss or gradient is NaN or infinite."""

    max_skips_in_a_row: int = Field(default=3, ge=0)
    """Steps in a row that may leave the policy as it is; the next one ends the run."""

    @model_validator(mode="before")
    @classmethod
    def _reward_names_its_bound(cls, data: Any) -> Any:
        reward = data.get("reward") if isinstance(data, dict) else None
        if isinstance(reward, int | float) and not isinstance(reward, bool):
            raise ValueError(f"reward needs max or min, as in {{min: {reward:g}}}, got {reward:g}")  # noqa: TRY004 -- pydantic's
        return data

    @model_validator(mode="after")
    def _bounds_can_be_kept(self) -> LimitsConfig:
        for key in ("logprob_abs_max", "kl", "grad_norm"):
            limit: LimitConfig | None = getattr(self, key)
            if limit is not None and limit.max is not None and limit.max <= 0:
                raise ValueError(f"{key}.max needs to be above 0, got {limit.max:g}")
        return self
