"""Checkpoints of a few bytes."""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoint.manifest import Contents, ModelIdentity
from megarl.checkpoint.store import CheckpointStore, Draft
from megarl.checkpoint.verify import hash_file

CONTENTS = Contents(
    model=ModelIdentity(architecture="Qwen3ForCausalLM", config={"hidden_size": 128}),
    layout={"policy": {"tp": 2, "pp": 1, "world": 4}},
)


def write_files(draft: Draft, fill: bytes = b"w") -> None:
    """100 and 60 bytes of a model, and a state."""
    (draft.folder / "policy").mkdir()
    (draft.folder / "policy" / "__0_0.distcp").write_bytes(fill * 100)
    (draft.folder / "policy" / ".metadata").write_bytes(fill * 60)
    (draft.folder / "state.json").write_text('{"step": 1}')


def save(store: CheckpointStore, step: int, fill: bytes = b"w") -> Path:
    """A checkpoint, one file of which the store is told of, and the others not."""
    draft = store.begin(step)
    write_files(draft, fill)
    name = "policy/__0_0.distcp"
    return draft.commit(CONTENTS, {name: hash_file(draft.folder / name)})
