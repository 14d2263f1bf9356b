"""What a checkpoint is, in its `manifest.json`, which is written after all that it names.

    {"format_version": 1, "step": 20, "model": {...}, "layout": {"policy": {"tp": 2, "world": 4}},
     "files": {"policy/__0_0.distcp": {"bytes": 4096, "sha256": "9f86d0..."}, ...}, "sha256": "60303a..."}

`sha256` at its end is of the manifest itself: all but this key, as `_canonical` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from megarl import __version__
from megarl.config import StageConfig
from megarl.config.trainer import ParallelConfig
from megarl.errors import DataError
from megarl.model_files.json_object import read_json_object

FORMAT_VERSION = 1
"""Of what this megarl writes, and the newest that it reads."""

MANIFEST = "manifest.json"

UNIMPORTANT = (
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
"""Keys of config.json, beside those that begin with `_`, that change neither a weight's shape nor what is computed."""


def step_name(step: int) -> str:
    """The folder of a step's checkpoint: `step-000020`."""
    return f"step-{step:06d}"


class NewerFormatError(DataError):
    """A checkpoint that a newer megarl wrote: it may be whole, and this one cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The model that a checkpoint is of: two of one identity have the same weights by name and shape."""

    architecture: str
    config: Mapping[str, Any]
    """The keys of config.json that matter."""

    @property
    def config_sha256(self) -> str:
        """Of `config`."""
        return hashlib.sha256(_canonical(self.config)).hexdigest()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Of a model with this config.json."""
        architectures = config.get("architectures") or [config.get("model_type", "unknown")]
        kept = {k: v for k, v in config.items() if k not in (*UNIMPORTANT, "architectures") and not k.startswith("_")}
        return cls(architecture=str(architectures[0]), config=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint's manifest says beside its files: the same for all of a run."""

    model: ModelIdentity
    layout: Mapping[str, Any]
    """By name of each trained model, its parallel sizes and the world that they divide."""
    data: FileRecord | None = None
    """The file of `data.path`, in whose rows the sampler stands; None: nothing is known of it."""

    @classmethod
    def of(cls, config: StageConfig) -> Self:
        """Of the checkpoints of a run.

        Raises:
            DataError: the model's config.json cannot be read.
        """
        model = ModelIdentity.of(read_json_object(Path(config.model.path) / "config.json"))
        layout = {"policy": _layout(config.trainer.parallel, config.placement.slots)}
        for role in config.roles:
            if role.optimizer is not None:
                layout[role.name] = _layout(role.parallel, config.placement.all_pools[role.pool].slots)
        return cls(model=model, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Contents):
    """All of it."""

    step: int
    files: Mapping[str, FileRecord]
    """By path relative to the checkpoint's folder, `/` between its parts."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC, as ISO 8601."""
    megarl_version: str = __version__
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.bytes for file in self.files.values())

    def as_json(self) -> bytes:
        """The content of `manifest.json`."""
        tree = asdict(self)
        return json.dumps(tree | {"sha256": _digest(tree)}, indent=1).encode() + b"\n"


_ADAPTER = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest:
    """Of the checkpoint in `folder`.

    Raises:
        NewerFormatError: a newer megarl wrote it.
        DataError: there is none, or it is damaged.
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
        raise DataError(f"{file} needs a number from 1 under format_version, got {version!r}")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{folder} is of format {version}, this megarl reads up to {FORMAT_VERSION}; needs a newer megarl"
        )
    said, found = tree.pop("sha256", None), _digest(tree)
    if said != found:
        raise DataError(f"{file} has sha256 {found}, needs {said}, as it says itself")
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as e:
        problem = e.errors(include_url=False)[0]
        raise DataError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from e


def require_same_model(saved: ModelIdentity, now: ModelIdentity, checkpoint: str) -> None:
    """Return if both are one.

    Args:
        checkpoint: what the error calls it.

    Raises:
        DataError: they are not, with every key in which they differ.
    """
    differences = []
    if saved.architecture != now.architecture:
        differences.append(f"architecture {saved.architecture}, got {now.architecture}")
    for key in sorted(saved.config.keys() | now.config.keys()):
        before, after = saved.config.get(key), now.config.get(key)
        if before != after:
            differences.append(f"{key} {before!r}, got {after!r}")
    if differences:
        raise DataError(f"checkpoint {checkpoint} is of another model: needs {'; '.join(differences)}")


def _layout(parallel: ParallelConfig, world: int) -> dict[str, Any]:
    return parallel.model_dump(mode="json", exclude_none=True) | {"world": world}


def _canonical(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _digest(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(tree)).hexdigest()
