"""Parameters of rotary position embeddings (RoPE, arXiv 2104.09864) and of their scaling to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.errors import ConfigError
from megarl.model_files.json_object import JsonMapping

REQUIRED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Required scaling parameters of each supported RoPE type.

Types that depend on the sequence length (`dynamic`, `longrope`) are not supported: a token's log-probability would
depend on how long its sequence becomes.
"""

_POSITIVE = ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
_NUMBERS = (*_POSITIVE, "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "partial_rotary_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of a model."""

    theta: float
    """Base of the rotation frequencies; the longest wavelength is about 2 pi theta tokens."""
    max_positions: int
    """Maximum sequence length in tokens."""
    rope_type: str = "default"
    """RoPE type, a key of `REQUIRED_PARAMETERS`."""
    scaling: tuple[tuple[str, Any], ...] = field(default=())
    """Scaling parameters of config.json as (name, value) pairs; empty for type "default"."""

    @classmethod
    def read(cls, parameters: JsonMapping, *, theta: float, max_positions: int, origin: str) -> Rope:
        """Parse `rope_parameters` or `rope_scaling` of a config.json.

        Args:
            theta: base of the frequencies if the parameters have no `rope_theta`.

        Raises:
            ConfigError: the RoPE type is not supported or lacks a parameter, or a parameter is no number.
        """
        _require_numbers(parameters, origin)
        # transformers 4 names it `type`
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if not isinstance(rope_type, str) or rope_type not in REQUIRED_PARAMETERS:
            raise ConfigError(
                f"{origin}: rope type {rope_type} is not supported; supported are {', '.join(REQUIRED_PARAMETERS)}"
            )
        partial = parameters.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise ConfigError(f"{origin}: partial_rotary_factor {partial} is not supported; supported is 1")
        missing = [name for name in REQUIRED_PARAMETERS[rope_type] if parameters.get(name) is None]
        if missing:
            raise ConfigError(f"{origin}: rope type {rope_type} needs {', '.join(missing)}")
        read = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
        stated = {k: v for k, v in parameters.items() if k not in read and v is not None}
        if rope_type in ("yarn", "llama3"):
            stated.setdefault("original_max_position_embeddings", max_positions)
        return cls(
            theta=float(parameters.get("rope_theta") or theta),
            max_positions=max_positions,
            rope_type=rope_type,
            scaling=tuple(stated.items()) if rope_type != "default" else (),
        )

    def scaling_parameter(self, name: str, default: float) -> float:
        """Return the scaling parameter `name`, or `default` if config.json does not set it."""
        return float(dict(self.scaling).get(name, default))


def _require_numbers(parameters: JsonMapping, origin: str) -> None:
    """Raise a ConfigError for parameters by layer type, which no supported family has, and for wrong values."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            raise ConfigError(
                f"{origin}: RoPE parameters by layer type are not supported, got some under {name}; all layers need "
                "the same"
            )
        if name not in _NUMBERS or value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (name in _POSITIVE and value <= 0):
            needs = "a positive number" if name in _POSITIVE else "a number"
            raise ConfigError(f"{origin}: RoPE parameter {name} needs {needs}, got {value!r}")
