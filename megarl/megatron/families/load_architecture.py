"""Load a `ModelArchitecture` from config.json: select the family's reader and the output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megarl.config import RmConfig, StageConfig
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
from megarl.megatron.families.architecture import (
    LM_SUFFIX,
    VALUE_SUFFIX,
    FamilyReader,
    Head,
    ModelArchitecture,
    hf_tensors_of,
    load_family,
)
from megarl.model_files.block_fp8 import find_config_problem
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import (
    config_file,
    describe_unread_file,
    find_corrections,
    find_false_copies,
    read_model_config,
)
from megarl.model_files.weight_index import HEAD_TENSOR, derived_tensor_patterns, find_tensor_mismatches, read_headers

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


REQUIRED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
"""Keys of config.json that every supported model requires."""


def read_hf_config(folder: Path) -> JsonObject:
    """Return `read_model_config(folder)` after checking that each of `REQUIRED_SIZES` is a positive number.

    Raises:
        DataError: the folder or file does not exist, the file is not a JSON object, a size is missing, as in those of
            many unsupported architectures, or `layer_types` does not name the type of each layer.
    """
    if not folder.is_dir():
        raise DataError(f"needs a folder in Hugging Face format, there is no folder {folder}")
    tree = read_model_config(folder)
    wrong = [key for key in REQUIRED_SIZES if not _is_positive_number(tree.get(key))]
    if wrong:
        raise DataError(_describe_missing_sizes(tree, wrong, origin=str(folder / "config.json")))
    kinds, layers = tree.get("layer_types"), tree["num_hidden_layers"]
    if isinstance(kinds, list) and len(kinds) != layers:
        raise DataError(
            f"{folder / 'config.json'}: layer_types needs num_hidden_layers = {layers} entries, got {len(kinds)}"
        )
    return tree


def _describe_missing_sizes(config: JsonMapping, missing: list[str], *, origin: str) -> str:
    """Return the message for a config.json without some of `REQUIRED_SIZES`: most are of unsupported architectures."""
    needs, names = f"needs a positive number under {', '.join(missing)}", config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or _language_model(name) in FAMILY_READERS:
        return f"{origin} {needs}"
    return f"{origin}: architecture {name} is not supported; for a family outside the package, config.json {needs}"


def load_architecture_from_folder(
    folder: Path, *, head: Head | None = "lm", family: str | None = None
) -> ModelArchitecture:
    """Return the architecture that `folder`/config.json describes, with output head `head`.

    A folder with weights but without MTP layers gives a model without them (`drop_missing_mtp_layers`).

    Args:
        family: import path of a family outside the package; see `load_architecture`.

    Raises:
        DataError: config.json is missing or invalid (`read_hf_config`).
        ConfigError: the architecture is not supported (`load_architecture`).
    """
    return drop_missing_mtp_layers(_load_configured(folder, head, family), folder)


def find_folder_notices(folder: Path, *, head: Head | None = "lm", family: str | None = None) -> list[str]:
    """Return one message for each way in which the model that is loaded differs from what the folder seems to hold.

    Raises:
        DataError, ConfigError: as in `load_architecture_from_folder`.
    """
    model, notices = _load_configured(folder, head, family), []
    number = model.num_mtp_layers
    if number != drop_missing_mtp_layers(model, folder).num_mtp_layers:
        names, ignored = ("1 MTP layer", "it") if number == 1 else (f"{number} MTP layers", "them")
        notices.append(f"{folder}: config.json names {names}, the folder has none: ignoring {ignored}")
    if model.head == "lm" and "tie_word_embeddings" in find_corrections(folder):
        notices.append(
            f"{folder}: config.json ties the output head to the embedding, the folder stores an {HEAD_TENSOR} with "
            "other values: using that head, as transformers does; tie_word_embeddings: false says so"
        )
    unread = describe_unread_file(folder)
    return notices if unread is None else [*notices, unread]


def model_head(config: StageConfig) -> Head:
    """Return the output head of the model that the stage trains."""
    return "value" if isinstance(config, RmConfig) else "lm"


def find_weight_problems(folder: Path, model: ModelArchitecture) -> list[str]:
    """Return one message for each way in which the safetensors of `folder` do not match `model`.

    Tensors that are ignored as copies of others are compared with these, the only ones whose values are read.
    """
    needed = {name: spec.shape for name, spec in model.tensors("float32").items()}
    derived = map(model.hf_name, derived_tensor_patterns(tied=model.tie_embeddings))
    ignored = (*derived, *model.ignored_patterns)
    problems = find_tensor_mismatches(
        folder, needed, model=model.name, ignored=ignored, optional=model.optional_tensors
    )
    if model.head == "lm":  # a value model reads neither the copies nor the head
        problems += find_false_copies(folder, tied=model.tie_embeddings, hf_name=model.hf_name)
    return problems


def _load_configured(folder: Path, head: Head | None, family: str | None) -> ModelArchitecture:
    return load_architecture(read_hf_config(folder), origin=str(folder / "config.json"), head=head, family=family)


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
