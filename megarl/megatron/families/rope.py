"""Parameters of rotary position embeddings (RoPE, arXiv 2104.09864) and of their scaling to longer contexts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.errors import ConfigError
from megarl.model_files.json_object import JsonMapping

REQUIRED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Required scaling parameters of each supported RoPE type.

Types that depend on the sequence length (`dynamic`, `longrope`) are not supported: a token's log-probability would
depend on how long its sequence becomes.
"""


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

        Raises:
            ConfigError: the RoPE type is not supported or lacks a parameter.
        """
        # transformers 4 names it `type`
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if rope_type not in REQUIRED_PARAMETERS:
            raise ConfigError(
                f"{origin}: rope type {rope_type} is not supported; supported are {', '.join(REQUIRED_PARAMETERS)}"
            )
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{origin}: partial_rotary_factor is not supported")
        missing = [name for name in REQUIRED_PARAMETERS[rope_type] if parameters.get(name) is None]
        if missing:
            raise ConfigError(f"{origin}: rope type {rope_type} needs {', '.join(missing)}")
        stated = {k: v for k, v in parameters.items() if k not in ("type", "rope_type", "rope_theta") and v is not None}
        if rope_type == "yarn":
            stated.setdefault("original_max_position_embeddings", max_positions)
        return cls(
            theta=theta,
            max_positions=max_positions,
            rope_type=rope_type,
            scaling=tuple(stated.items()) if rope_type != "default" else (),
        )

    def scaling_parameter(self, name: str, default: float) -> float:
        """Return the scaling parameter `name`, or `default` if config.json does not set it."""
        return float(dict(self.scaling).get(name, default))
