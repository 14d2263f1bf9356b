"""A model family, and how one outside the package is loaded from the import path in `model.family`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megarl.config.import_path import load_object
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.model_files.json_object import JsonMapping


class FamilyReader(Protocol):
    """Reader of one family's config.json."""

    def __call__(self, config: JsonMapping, *, origin: str) -> ModelArchitecture:
        """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The models of one architecture name in config.json.

        def read(config, *, origin):
            return HfConfig.read(config, origin=origin).to_architecture("MistralForCausalLM", origin=origin)

        FAMILY = ModelFamily(architecture="MistralForCausalLM", read=read)

    `HfConfig` validates the keys that most families share; a family with further keys subclasses it. Checks of the
    configuration need the keys in `megarl.megatron.families.model_folder.REQUIRED_SIZES` under these names.
    """

    architecture: str
    """Name under `architectures` in config.json, which ends in `ForCausalLM`. The family's value models have the same
    name with `ForSequenceClassification`."""
    read: FamilyReader


def load_family(path: str, *, key: str = "model.family") -> ModelFamily:
    """Import the `ModelFamily` at `package.module:name`.

    Args:
        path: the import path.
        key: YAML path of the option, for error messages.

    Raises:
        ConfigError: it cannot be imported or is no `ModelFamily`.
    """
    family = load_object(path, key=key, kind="FAMILY")
    if not isinstance(family, ModelFamily):
        raise ConfigError(
            f"{key} needs a ModelFamily (megarl.megatron.families.family), got {path}, a {type(family).__name__}"
        )
    return family
