"""The section `algorithm`: any algorithm, chosen by `type`; one outside the package by its import path."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

from pydantic import Discriminator, SerializeAsAny, Tag, ValidatorFunctionWrapHandler, WrapValidator

from megarl.config.algorithms.actor_critic import (
    DistillationConfig,
    PfPpoConfig,
    PpoConfig,
    PrimeConfig,
    SafeRlhfConfig,
    VapoConfig,
)
from megarl.config.algorithms.group_baseline import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
)
from megarl.config.algorithms.policy import PolicyConfig
from megarl.config.section import load_object
from megarl.errors import ConfigError

IMPORTED_TAG = "package.module:Class"


def load_algorithm_class(path: str) -> type[object]:
    """Import the algorithm class at `package.module:Class`; its attribute `Config` describes the section `algorithm`.

    Raises:
        ConfigError: there is no such class, it has no method `train`, or `Config` does not extend `PolicyConfig`.
    """
    key = "algorithm.type"
    found = load_object(path, key=key, kind="Class")
    if not isinstance(found, type) or not callable(getattr(found, "train", None)):
        raise ConfigError(f"{key} needs a class with a method train(run, config), got {path} = {found!r}")
    config_class = getattr(found, "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, PolicyConfig)):
        raise ConfigError(f"{key}: {path}.Config needs to be a subclass of PolicyConfig, got {config_class!r}")
    return found


def _validate_imported(value: object, _: ValidatorFunctionWrapHandler) -> PolicyConfig:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    config_class: type[PolicyConfig] = load_algorithm_class(str(kind)).Config  # type: ignore[attr-defined]
    return config_class.model_validate(value)


def _tag(value: object) -> Hashable:
    kind = value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", "grpo")
    return IMPORTED_TAG if isinstance(kind, str) and ":" in kind else kind


AlgorithmConfig = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[DrGrpoConfig, Tag("dr_grpo")]
    | Annotated[RlooConfig, Tag("rloo")]
    | Annotated[GspoConfig, Tag("gspo")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[GmpoConfig, Tag("gmpo")]
    | Annotated[DapoConfig, Tag("dapo")]
    | Annotated[ReinforcePlusPlusConfig, Tag("reinforce_pp")]
    | Annotated[ReinforcePlusPlusBaselineConfig, Tag("reinforce_pp_baseline")]
    | Annotated[RemaxConfig, Tag("remax")]
    | Annotated[PpoConfig, Tag("ppo")]
    | Annotated[PfPpoConfig, Tag("pf_ppo")]
    | Annotated[VapoConfig, Tag("vapo")]
    | Annotated[SafeRlhfConfig, Tag("safe_rlhf")]
    | Annotated[PrimeConfig, Tag("prime")]
    | Annotated[DistillationConfig, Tag("distillation")]
    | Annotated[SerializeAsAny[PolicyConfig], WrapValidator(_validate_imported), Tag(IMPORTED_TAG)],
    Discriminator(_tag),
]
"""Configuration of any algorithm; `type` chooses which, `grpo` by default."""
