"""From the content of a config.json to its family's table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import ConfigError, DataError
from megarl.megatron.families import (
    deepseek_v3,
    gemma2,
    llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from megarl.megatron.families.architecture import LM_SUFFIX, VALUE_SUFFIX, Decoder, Head
from megarl.model_files.json_object import read_json_object


class Reader(Protocol):
    """Of one family; see `read_family`."""

    def __call__(self, config: Mapping[str, Any], *, origin: str) -> Decoder:
        """The model that the content of a config.json describes."""


READERS: Mapping[str, Reader] = {
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "LlamaForCausalLM": llama.read,
    "Gemma2ForCausalLM": gemma2.read,
    "MixtralForCausalLM": mixtral.read,
    "DeepseekV3ForCausalLM": deepseek_v3.read,
}
"""By architecture, as config.json names it; of value models, that of the language model."""


def read_config(path: str) -> tuple[dict[str, Any], Path]:
    """The content of the config.json that `path` is, or that lies in the folder `path`; and the file.

    Raises:
        DataError: there is no such file, or it is no JSON object.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    return read_json_object(file), file


def read_family(config: Mapping[str, Any], *, origin: str, head: Head | None = "lm") -> Decoder:
    """The model that the content of a config.json describes; `origin` names the file in errors.

    Args:
        head: what the model is to end in; None: what its architecture says. A language model becomes a value model
            whose head starts from zeros; no value model becomes a language model.

    Raises:
        ConfigError: the architecture or one of its options is not supported, a key is missing, or the model has a
            value head and needs logits.
    """
    if config.get("quantization_config"):
        raise ConfigError(f"{origin}: quantization_config is not supported; weights need to be unquantised")
    architecture = (config.get("architectures") or ["(none)"])[0]
    is_value = architecture.endswith(VALUE_SUFFIX)
    family = architecture.removesuffix(VALUE_SUFFIX) + LM_SUFFIX if is_value else architecture
    if family not in READERS:
        raise ConfigError(
            f"{origin}: architecture {architecture} is not supported; supported are {', '.join(READERS)}, and these "
            f"with {VALUE_SUFFIX} at the end"
        )
    if is_value:
        _require_value_head(config, architecture, head, origin=origin)
    model = READERS[family](config, origin=origin)
    return model.with_value_head(from_lm=not is_value) if is_value or head == "value" else model


def _require_value_head(config: Mapping[str, Any], architecture: str, head: Head | None, *, origin: str) -> None:
    if head == "lm":
        raise ConfigError(
            f"{origin}: {architecture} has one value a token and no logits, needed is a language model, "
            f"{architecture.removesuffix(VALUE_SUFFIX)}{LM_SUFFIX}"
        )
    labels = config.get("id2label")
    # transformers writes no labels where they are two
    num_labels = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if num_labels != 1:
        raise ConfigError(f"{origin}: {architecture} needs 1 label to be a value model, got {num_labels} (id2label)")


def read_model(path: str, *, head: Head | None = None) -> tuple[Decoder, str]:
    """Return the architecture that a model folder or a config.json describes, and its dtype ("bfloat16" by default).

    Args:
        head: as in `read_family`.

    Raises:
        DataError: there is no such file, or it is no JSON object.
        ConfigError: its architecture is not supported.
    """
    config, file = read_config(path)
    try:
        model = read_family(config, origin=str(file), head=head)
    except KeyError as e:
        raise DataError(f"{file}: lacks {e}") from e
    return model, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
