"""Checkpoints of a few bytes, for tests."""

import hashlib
import json
from pathlib import Path

from megarl.checkpoint.manifest import CheckpointMetadata, ModelIdentity, hash_file
from megarl.checkpoint.store import CheckpointStore, PendingCheckpoint

METADATA = CheckpointMetadata(
    model=ModelIdentity(architecture="Qwen3ForCausalLM", config={"hidden_size": 128}),
    layout={"policy": {"tp": 2, "pp": 1, "world": 4}},
)


def write_files(pending: PendingCheckpoint, byte: bytes = b"w") -> None:
    """Write model files of 100 and 60 bytes, and a run state of 11 bytes."""
    (pending.folder / "policy").mkdir()
    (pending.folder / "policy" / "__0_0.distcp").write_bytes(byte * 100)
    (pending.folder / "policy" / ".metadata").write_bytes(byte * 60)
    (pending.folder / "state.json").write_text('{"step": 1}')


def save_checkpoint(store: CheckpointStore, step: int, byte: bytes = b"w") -> Path:
    """Save a checkpoint; one file's record is passed to the store, the store hashes the others itself."""
    pending = store.begin(step)
    write_files(pending, byte)
    name = "policy/__0_0.distcp"
    return pending.commit(METADATA, {name: hash_file(pending.folder / name)})


def write_format_1_manifest(folder: Path, step: int) -> None:
    """Replace the manifest of the checkpoint in `folder` by one of format 1, with a correct checksum."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            content = path.read_bytes()
            record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            files[path.relative_to(folder).as_posix()] = record
    tree = {
        "model": {"architecture": "Qwen3ForCausalLM", "config": {"hidden_size": 128}},
        "layout": {"policy": {"tp": 2, "pp": 1, "world": 4}},
        "data": None,
        "step": step,
        "files": files,
        "created": "2026-01-02T03:04:05+00:00",
        "megarl_version": "0.1.0",
        "format_version": 1,
    }
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(tree | {"sha256": digest}, indent=1) + "\n")


def take_over(run_dir: Path) -> None:
    """Replace the lock of the run folder by one of another host, as if this process had been suspended for long."""
    content = json.loads((run_dir / "lock").read_bytes())
    content |= {"host": "n2", "machine": "another boot", "since": "2026-01-02T03:04:05+00:00", "pid": 123, "token": "b"}
    (run_dir / "new-lock").write_text(json.dumps(content))
    (run_dir / "new-lock").replace(run_dir / "lock")
