"""Supported Hugging Face model families and the mapping between their tensors and megatron-core parameters."""

from typing import TYPE_CHECKING

from megarl.lazy_names import lazy_names

if TYPE_CHECKING:
    from megarl.megatron.families.architecture import FamilyReader as FamilyReader
    from megarl.megatron.families.architecture import Layer as Layer
    from megarl.megatron.families.architecture import ModelArchitecture as ModelArchitecture
    from megarl.megatron.families.architecture import ModelFamily as ModelFamily
    from megarl.megatron.families.attention import GatedDeltaNet as GatedDeltaNet
    from megarl.megatron.families.attention import GroupedQueryAttention as GroupedQueryAttention
    from megarl.megatron.families.attention import LatentAttention as LatentAttention
    from megarl.megatron.families.attention import Rope as Rope
    from megarl.megatron.families.config_json import HfConfig as HfConfig
    from megarl.megatron.families.feed_forward import GatedMlp as GatedMlp
    from megarl.megatron.families.feed_forward import HfExpertNames as HfExpertNames
    from megarl.megatron.families.feed_forward import MixtureOfExperts as MixtureOfExperts
    from megarl.megatron.families.feed_forward import Routing as Routing
    from megarl.megatron.families.parameter_map import ParameterMap as ParameterMap
    from megarl.megatron.families.parameter_map import replicated as replicated
    from megarl.megatron.families.parameter_map import split_columns as split_columns
    from megarl.megatron.families.parameter_map import split_rows as split_rows

__all__ = [
    "FamilyReader",
    "GatedDeltaNet",
    "GatedMlp",
    "GroupedQueryAttention",
    "HfConfig",
    "HfExpertNames",
    "LatentAttention",
    "Layer",
    "MixtureOfExperts",
    "ModelArchitecture",
    "ModelFamily",
    "ParameterMap",
    "Rope",
    "Routing",
    "replicated",
    "split_columns",
    "split_rows",
]

__getattr__ = lazy_names(
    __name__,
    {
        "megarl.megatron.families.architecture": (
            "FamilyReader",
            "Layer",
            "ModelArchitecture",
            "ModelFamily",
        ),
        "megarl.megatron.families.attention": (
            "GatedDeltaNet",
            "GroupedQueryAttention",
            "LatentAttention",
            "Rope",
        ),
        "megarl.megatron.families.config_json": ("HfConfig",),
        "megarl.megatron.families.feed_forward": (
            "GatedMlp",
            "HfExpertNames",
            "MixtureOfExperts",
            "Routing",
        ),
        "megarl.megatron.families.parameter_map": (
            "ParameterMap",
            "replicated",
            "split_columns",
            "split_rows",
        ),
    },
)
