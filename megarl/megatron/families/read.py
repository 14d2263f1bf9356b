"""From the content of a config.json to its family's table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, DataError
from megarl.megatron.families import PLANNED_ARCHITECTURES, supported
from megarl.megatron.families.decoder import Decoder
from megarl.megatron.families.deepseek_v3 import DeepseekV3Model
from megarl.megatron.families.dense import DenseModel
from megarl.megatron.families.qwen3_moe import Qwen3MoeModel


def read_config(path: str) -> tuple[dict[str, Any], Path]:
    """The content of the config.json that `path` is, or that lies in the folder `path`; and the file.

    Raises:
        DataError: there is no such file, or it is no JSON object.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{file}: cannot be read as a model's config.json: {e}") from e
    if not isinstance(config, dict):
        raise DataError(f"{file}: a model's config.json is an object, got {type(config).__name__}")
    return config, file


def read_family(config: Mapping[str, Any], *, origin: str) -> Decoder:
    """The table of any architecture that has one, also of those that cannot be trained yet; `origin` is for errors.

    Raises:
        ConfigError: the architecture or one of its options has no table.
        KeyError: a size is missing.
    """
    architecture = (config.get("architectures") or ["(none)"])[0]
    if config.get("quantization_config"):
        raise ConfigError(
            f"{origin}: quantization_config is not supported; without it, unquantised weights are planned"
        )
    if supported(architecture):
        return DenseModel.from_hf(config, origin=origin)
    if config.get("attention_bias"):
        raise ConfigError(f"{origin}: attention_bias is not supported")
    match architecture:
        case "Qwen3MoeForCausalLM":
            return Qwen3MoeModel.from_hf(config)
        case "DeepseekV3ForCausalLM":
            return DeepseekV3Model.from_hf(config)
    raise ConfigError(
        f"{origin}: architecture {architecture} is not supported; supported are {', '.join(PLANNED_ARCHITECTURES)}"
    )
