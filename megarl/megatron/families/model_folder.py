"""Checks of a Hugging Face model folder: its config.json, its tensors, and whether they fit together."""

from __future__ import annotations

from pathlib import Path

from megarl.config import RmConfig, StageConfig
from megarl.errors import DataError
from megarl.megatron.families.architecture import Head, ModelArchitecture
from megarl.megatron.families.load_architecture import drop_missing_mtp_layers, load_architecture
from megarl.model_files.json_object import JsonObject
from megarl.model_files.model_config import describe_unread_file, find_corrections, find_false_copies, read_model_config
from megarl.model_files.weight_index import HEAD_TENSOR, derived_tensor_patterns, find_tensor_mismatches

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
        DataError: the folder or file does not exist, the file is not a JSON object, a size is missing, or `layer_types`
            does not name the type of each layer.
    """
    if not folder.is_dir():
        raise DataError(f"needs a folder in Hugging Face format, there is no folder {folder}")
    tree = read_model_config(folder)
    wrong = [key for key in REQUIRED_SIZES if not _is_positive_number(tree.get(key))]
    if wrong:
        raise DataError(f"{folder / 'config.json'} needs a positive number under {', '.join(wrong)}")
    kinds, layers = tree.get("layer_types"), tree["num_hidden_layers"]
    if isinstance(kinds, list) and len(kinds) != layers:
        raise DataError(
            f"{folder / 'config.json'}: layer_types needs num_hidden_layers = {layers} entries, got {len(kinds)}"
        )
    return tree


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
