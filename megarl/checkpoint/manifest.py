"""The manifest of a checkpoint, `manifest.json`, which is written after all files that it lists.

    {"format_version": 2, "step": 20, "model": {...}, "layout": {"policy": {"tp": 2, "world": 4}},
     "files": {"policy/__0_0.distcp": {"bytes": 4096, "sha256": "9f86d0..."}, ...}, "sha256": "60303a..."}

The last key, `sha256`, is the checksum of the manifest itself without this key, as `_canonical` serializes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError

from megarl import __version__
from megarl.config import StageConfig
from megarl.config.trainer import ParallelConfig
from megarl.errors import DataError
from megarl.model_files.json_object import read_json_object
from megarl.model_files.model_config import read_model_config

FORMAT_VERSION = 2
"""Checkpoint format that this version of megarl writes, and the only one that it reads."""

MANIFEST = "manifest.json"

IGNORED_CONFIG_KEYS = (
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Keys of config.json that affect neither weight shapes nor computation. Keys that begin with `_` are ignored too."""


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, such as `step-000020`."""
    return f"step-{step:06d}"


class UnsupportedFormatError(DataError):
    """A checkpoint in a format that this version of megarl cannot read; it may be valid all the same."""

    age: ClassVar[str]
    """`newer` or `older` than `FORMAT_VERSION`."""


class NewerFormatError(UnsupportedFormatError):
    """A checkpoint in a newer format than `FORMAT_VERSION`."""

    age = "newer"


class OlderFormatError(UnsupportedFormatError):
    """A checkpoint in an older format than `FORMAT_VERSION`."""

    age = "older"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and checksum of a file at the time it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Identity of a model: equal identities imply equal parameter names and shapes."""

    architecture: str
    config: Mapping[str, Any]
    """config.json without `architectures` and `IGNORED_CONFIG_KEYS`."""

    @property
    def config_sha256(self) -> str:
        """SHA-256 of `config` in canonical JSON."""
        return hashlib.sha256(_canonical(self.config)).hexdigest()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the identity of a model with this config.json."""
        architectures = config.get("architectures") or [config.get("model_type", "unknown")]
        kept = {
            k: v
            for k, v in config.items()
            if k not in (*IGNORED_CONFIG_KEYS, "architectures") and not k.startswith("_")
        }
        return cls(architecture=str(architectures[0]), config=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """Manifest entries that are the same for all checkpoints of a run."""

    model: ModelIdentity
    layout: Mapping[str, Any]
    """Name of each trained model -> its parallel sizes, and its world size under `world`."""
    data: Mapping[str, FileRecord] = field(default_factory=dict)
    """YAML key -> file of training rows, to which the sampler's position refers; empty: not recorded."""

    @classmethod
    def from_config(cls, config: StageConfig) -> Self:
        """Return the metadata of a run's checkpoints, without `data`.

        Raises:
            DataError: the model's config.json cannot be read.
        """
        model = ModelIdentity.from_config(read_model_config(config.model.path))
        layout = {"policy": _layout(config.trainer.parallel, config.placement.slots)}
        for auxiliary in config.auxiliary_models:
            if auxiliary.optimizer is not None:
                layout[auxiliary.name] = _layout(auxiliary.parallel, config.placement.all_pools[auxiliary.pool].slots)
        return cls(model=model, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(CheckpointMetadata):
    """Content of `manifest.json` except its checksum."""

    step: int
    files: Mapping[str, FileRecord]
    """Path relative to the checkpoint folder, with `/` as separator -> size and checksum."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of creation in UTC, ISO 8601."""
    megarl_version: str = __version__
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Total size of the listed files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def as_json(self) -> bytes:
        """Return the content of `manifest.json`, checksum included."""
        tree = asdict(self)
        return json.dumps(tree | {"sha256": _digest(tree)}, indent=1).encode() + b"\n"


_ADAPTER = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        UnsupportedFormatError: the checkpoint has a newer or older format.
        DataError: the manifest is missing or damaged.
    """
    file = folder / MANIFEST
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise DataError(f"{file} is missing") from e
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}") from e
    tree = read_json_object(file)
    version = tree.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise DataError(f"{file} needs an integer of at least 1 under format_version, got {version!r}")
    if version != FORMAT_VERSION:
        reason = f"checkpoint {folder} has format {version}, but this version of megarl reads format {FORMAT_VERSION}"
        if version > FORMAT_VERSION:
            raise NewerFormatError(f"{reason}: use the newer version that wrote the checkpoint")
        raise OlderFormatError(f"{reason}: start a new run, or resume with the version that wrote the checkpoint")
    stated, found = tree.pop("sha256", None), _digest(tree)
    if stated != found:
        raise DataError(f"{file} has sha256 {found}, but its own key sha256 states {stated}")
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as e:
        problem = e.errors(include_url=False)[0]
        raise DataError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from e


def require_same_model(saved: ModelIdentity, current: ModelIdentity, checkpoint: str) -> None:
    """Return if both identities are equal.

    Args:
        checkpoint: name of the checkpoint, for the error message.

    Raises:
        DataError: the identities differ; the message lists every key that differs.
    """
    differences = []
    if saved.architecture != current.architecture:
        differences.append(f"architecture {saved.architecture}, got {current.architecture}")
    for key in sorted(saved.config.keys() | current.config.keys()):
        before, after = saved.config.get(key), current.config.get(key)
        if before != after:
            differences.append(f"{key} {before!r}, got {after!r}")
    if differences:
        raise DataError(f"checkpoint {checkpoint} belongs to another model: needs {'; '.join(differences)}")


def _layout(parallel: ParallelConfig, world: int) -> dict[str, Any]:
    return parallel.model_dump(mode="json", exclude_none=True) | {"world": world}


def _canonical(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _digest(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(tree)).hexdigest()
