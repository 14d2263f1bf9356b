"""The section `algorithm`: the union of all algorithms, chosen by `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Tag

from megarl.config.algorithms.actor_critic import PfPpoConfig, PpoConfig, SafeRlhfConfig, VapoConfig
from megarl.config.algorithms.group_baseline import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    RlooConfig,
)
from megarl.config.algorithms.model_advantages import DistillationConfig, PrimeConfig
from megarl.config.algorithms.reinforce_family import (
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
)
from megarl.config.section import discriminate_by_type

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
    | Annotated[DistillationConfig, Tag("distillation")],
    discriminate_by_type("grpo"),
]
"""Configuration of any algorithm; `type` chooses which, `grpo` by default."""
