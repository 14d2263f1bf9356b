"""The base of every configuration section."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator


class Section(BaseModel):
    """Frozen; unknown keys are errors; every field states its meaning in the docstring below it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


def by_type(default: str) -> Discriminator:
    """Chooses the member of a union by its `type`, so that `--set` may leave it out where the default is meant."""

    def tag(value: Any) -> Any:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)

    return Discriminator(tag)
