"""Base class of all configuration sections."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import cast

from pydantic import BaseModel, ConfigDict, Discriminator, model_validator


class Section(BaseModel):
    """A frozen section of the configuration; unknown keys are errors. The docstring below a field documents it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_partial_sections(cls, data: object) -> object:
        """Fill subsections that are given in part with the field's own default, which may differ from the class's."""
        if not isinstance(data, dict):
            return data
        out = dict(data)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section) and isinstance(data.get(name), dict):
                out[name] = merge(field.default.model_dump(exclude_unset=True), data[name])
        return out


def merge(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Merge two trees recursively; the values of `given` win."""
    out = {**defaults, **given}
    for key in defaults.keys() & given.keys():
        if isinstance(defaults[key], dict) and isinstance(given[key], dict):
            out[key] = merge(cast("Mapping[str, object]", defaults[key]), cast("Mapping[str, object]", given[key]))
    return out


def discriminate_by_type(default: str) -> Discriminator:
    """Make a discriminator that chooses a union's member by the key `type`; a missing `type` means `default`."""

    def tag(value: object) -> Hashable:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)

    return Discriminator(tag)
