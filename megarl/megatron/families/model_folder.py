"""What is wrong with a model folder, read from its JSON and the headers of its safetensors: no tensor, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config import RmConfig, StageConfig
from megarl.errors import DataError
from megarl.megatron.families.architecture import Decoder, Head
from megarl.megatron.families.load_architecture import read_family
from megarl.model_files.json_object import read_json_object
from megarl.model_files.weight_index import derived_tensors, problems

SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
"""Keys of config.json without which no supported model can be built."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The content of `folder`/config.json, with a positive number under each of `SIZES`.

    Raises:
        DataError: no such folder or file, not a JSON object, or a size is missing.
    """
    if not folder.is_dir():
        raise DataError(f"needs a folder in Hugging Face format, there is no folder {folder}")
    tree = read_json_object(folder / "config.json")
    wrong = [key for key in SIZES if not _positive(tree.get(key))]
    if wrong:
        raise DataError(f"{folder / 'config.json'} needs a positive number under {', '.join(wrong)}")
    return tree


def read_decoder(folder: Path, *, head: Head | None = "lm") -> Decoder:
    """The model that `folder`/config.json describes, ending in `head`; see `read_family`.

    Raises:
        DataError: see `read_hf_config`.
        ConfigError: it is not supported.
    """
    return read_family(read_hf_config(folder), origin=str(folder / "config.json"), head=head)


def model_head(config: StageConfig) -> Head:
    """What the model that the stage trains ends in."""
    return "value" if isinstance(config, RmConfig) else "lm"


def weight_problems(folder: Path, model: Decoder) -> list[str]:
    """A sentence for each way in which the safetensors of `folder` are not the weights of `model`."""
    needed = {name: spec.shape for name, spec in model.tensors("float32").items()}
    ignored = (*derived_tensors(tied=model.tie_embeddings), *model.unused)
    return problems(folder, needed, model=model.architecture, ignored=ignored, optional=model.absent)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
