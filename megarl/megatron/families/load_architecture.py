"""Load a `ModelArchitecture` from config.json: select the family's reader and the output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

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
from megarl.megatron.families.architecture import LM_SUFFIX, VALUE_SUFFIX, Head, ModelArchitecture, hf_tensors_of
from megarl.megatron.families.family import FamilyReader, load_family
from megarl.model_files.block_fp8 import find_config_problem
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import config_file, read_model_config
from megarl.model_files.weight_index import read_headers

FAMILY_READERS: Mapping[str, FamilyReader] = {
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "LlamaForCausalLM": llama.read,
    "Gemma2ForCausalLM": gemma2.read,
    "MixtralForCausalLM": mixtral.read,
    "DeepseekV3ForCausalLM": deepseek_v3.read,
}
"""Reader by architecture name in config.json; value models use the reader of the language model."""


def read_config(path: str) -> tuple[JsonObject, Path]:
    """Return `read_model_config(path)` and the path of the file; `path` is the file or its folder."""
    return read_model_config(path), config_file(path)


def load_architecture(
    config: JsonMapping, *, origin: str, head: Head | None = "lm", family: str | None = None
) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is the file's name in errors.

    Args:
        family: import path of a `ModelFamily` outside the package, which reads the models of its architecture name;
            all others are read by the families of the package.
        head: required output head; None: the head of the config's architecture. With "value", a language model becomes
            a value model whose head starts from zeros. A value model cannot become a language model.

    Raises:
        ConfigError: the architecture or one of its options is not supported, a key is missing, the model has a value
            head while `head` is "lm", or `family` cannot be imported.
    """
    problem = find_config_problem(config)
    if problem is not None:
        raise ConfigError(f"{origin}: {problem}")
    architecture = _architecture_name(config, origin)
    is_value, language_model = architecture.endswith(VALUE_SUFFIX), _language_model(architecture)
    readers = dict(FAMILY_READERS)
    if family is not None:
        outside = load_family(family)
        readers[outside.architecture] = outside.read
    if language_model not in readers:
        raise ConfigError(
            f"{origin}: architecture {architecture} is not supported; supported are {', '.join(readers)}, and their "
            f"value models ({VALUE_SUFFIX} instead of {LM_SUFFIX}); model.family names a family outside the package"
        )
    if is_value:
        _require_value_head(config, architecture, head, origin=origin)
    model = readers[language_model](config, origin=origin)
    return model.with_value_head(from_lm=not is_value) if is_value or head == "value" else model


def require_family(path: str, family: str | None, *, key: str = "model.family") -> None:
    """Return if `family` is None, or the family that reads the config.json in folder `path` or at `path`.

    Args:
        key: YAML key or option that names the family, for error messages.

    Raises:
        ConfigError: it cannot be imported, or reads the models of another architecture name.
    """
    if family is None:
        return
    expected = load_family(family, key=key).architecture
    try:
        config, file = read_config(path)
        architecture = _architecture_name(config, str(file))
    except DataError:
        return  # reported by those who read the model
    if _language_model(architecture) != expected:
        raise ConfigError(f"{key}: {family} reads {expected} models, got {architecture} in {file}")


def _architecture_name(config: JsonMapping, origin: str) -> str:
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{origin}: architectures needs a list of names, got {names!r}")
    return names[0]


def _language_model(architecture: str) -> str:
    """Return the architecture name of the language model, also for that of a value model."""
    return architecture.removesuffix(VALUE_SUFFIX) + LM_SUFFIX if architecture.endswith(VALUE_SUFFIX) else architecture


def _require_value_head(config: JsonMapping, architecture: str, head: Head | None, *, origin: str) -> None:
    if head == "lm":
        raise ConfigError(
            f"{origin}: {architecture} has a value head and no logits; a language model is needed, "
            f"{architecture.removesuffix(VALUE_SUFFIX)}{LM_SUFFIX}"
        )
    labels = config.get("id2label")
    # transformers does not write id2label if there are two labels, its default
    num_labels = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if num_labels != 1:
        raise ConfigError(f"{origin}: {architecture} needs 1 label to be a value model, got {num_labels} (id2label)")


def drop_missing_mtp_layers(model: ModelArchitecture, folder: Path) -> ModelArchitecture:
    """Return `model` without MTP layers if `folder` holds weights, and none of its MTP layers.

    transformers' save_pretrained drops the MTP layers of a model, but not their number in config.json.
    """
    if model.num_mtp_layers == 0:
        return model
    try:
        stored = read_headers(folder)
    except DataError:
        return model  # a folder without weights; damaged ones are reported by those who read them
    mtp_tensors = hf_tensors_of(model.mtp_parameter_maps().values(), "float32")
    return model if mtp_tensors.keys() & stored.keys() else replace(model, num_mtp_layers=0)


def load_architecture_and_dtype(
    path: str, *, head: Head | None = None, family: str | None = None
) -> tuple[ModelArchitecture, str]:
    """Return the architecture that a model folder or a config.json describes, and its dtype ("bfloat16" by default).

    A folder with weights but without MTP layers gives a model without them (`drop_missing_mtp_layers`).

    Args:
        head: required output head; see `load_architecture`.
        family: import path of a family outside the package; see `load_architecture`.

    Raises:
        DataError: the file does not exist, is not a JSON object or lacks a key.
        ConfigError: the architecture is not supported, or `family` cannot be imported.
    """
    config, file = read_config(path)
    try:
        model = load_architecture(config, origin=str(file), head=head, family=family)
    except KeyError as e:
        raise DataError(f"{file}: {e} is missing") from e
    model = drop_missing_mtp_layers(model, Path(path))
    return model, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
