"""A run that passes preflight: a tiny model, a few rows, a configuration."""

import json
from pathlib import Path
from typing import Any

import yaml

from megarl.data.tiny_checkpoint import write_tiny_model

ROWS = [{"prompt": f"{i} + 1 =\n", "answer": str(i + 1), "response": f"#### {i + 1}"} for i in range(8)]


def write_tiny_run(folder: Path) -> dict[str, Any]:
    """Write model and data to `folder`; return the content of the run's YAML file."""
    write_tiny_model(folder / "model", [row["prompt"] + row["response"] for row in ROWS], seed=0, context_length=128)
    write_rows(folder / "train.jsonl", ROWS)
    write_rows(folder / "heldout.jsonl", ROWS[:2])
    return {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "heldout.jsonl")},
        "rollout": {"max_new_tokens": 32},
    }


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write `rows` to `path` as JSONL; return `path`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(path: Path, tree: dict[str, Any]) -> Path:
    """Write `tree` to `path` as YAML; return `path`."""
    path.write_text(yaml.safe_dump(tree))
    return path
