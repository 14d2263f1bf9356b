"""Writes a tiny model, arithmetic problems, and configurations of runs on them."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from megarl.data.demo_arithmetic import write_arithmetic
from megarl.data.tiny_checkpoint import CHAT_TEMPLATE, write_tiny_model
from megarl.data.tokenizer import load_tokenizer
from tests.time_limits import UNREACHED_SECONDS

NUM_HELD_OUT = 6
SIZES = {"vocab_size": 300, "hidden_size": 64, "ffn_size": 96, "num_layers": 2, "context_length": 160}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
"""Sizes of the model."""
STEPS = 24
"""Default number of steps of a run; each takes a quarter of a second."""
EVERY = 4
"""Default number of steps between two checkpoints."""
LR = 2e-3
PATIENCE = UNREACHED_SECONDS
PATIENT: dict[str, dict[str, Any]] = {
    "placement": {"start_timeout_seconds": PATIENCE, "node_check_timeout_seconds": PATIENCE},
    "rollout": {"request_timeout_seconds": PATIENCE},
    "weight_sync": {"timeout_seconds": PATIENCE, "abort_seconds": 100.0},
    "trainer": {"timeout_seconds": PATIENCE},
    "recovery": {"engine_stall_seconds": PATIENCE, "grace_seconds": PATIENCE},
}
"""Time limits that a run on a slow, busy machine does not reach."""


def write_world(folder: Path) -> Path:
    """Write `model/`, `chat/`, which is the model with a chat template, and `data/` into `folder`; return it."""
    files = write_arithmetic(folder / "data", seed=0, num_train=64, num_heldout=NUM_HELD_OUT)
    rows = [json.loads(line) for line in Path(files.sft).read_text().splitlines()]
    texts = [row["prompt"] + row["response"] for row in rows]
    write_tiny_model(folder / "model", texts, seed=0, **SIZES)
    shutil.copytree(folder / "model", folder / "chat")
    tokenizer = load_tokenizer(folder / "chat")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "chat")
    return folder


def run_tree(world: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """Return a configuration with two trainer ranks, one engine, 4 prompts x 2 samples; `sections` replace sections.

    The reward is whether the completion contains a 1, which some completions of a random model do and others do not.
    """
    tree = {
        "run_dir": str(run_dir),
        "model": {"path": str(world / "model")},
        "data": {"path": str(world / "data/train.jsonl"), "eval_path": str(world / "data/heldout.jsonl")},
        "algorithm": {"kl_loss": None, "group_size": 2, "prompts_per_step": 4},
        "trainer": {"steps": STEPS, "optimizer": {"lr": LR}},
        "rollout": {"max_new_tokens": 12},
        "reward": {"terms": {"one": {"type": "format", "pattern": "1"}}},
        "placement": {"slots_per_node": 2},
        "checkpoint": {"every": EVERY, "keep_every": EVERY},
        "weight_sync": {},
        "recovery": {},
    }
    return patient(tree | sections)


def patient(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the time limits of `PATIENT`, except those that it sets itself."""
    return {name: PATIENT[name] | section if name in PATIENT else section for name, section in tree.items()}


def write_run(world: Path, folder: Path, **sections: Any) -> Path:
    """Write the YAML file of a run with the folder `folder`/run, and return its path."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run_tree(world, folder / "run", **sections)))
    return path


def write_sft(world: Path, folder: Path, **sections: Any) -> Path:
    """Write the YAML file of an SFT run with the folder `folder`/run, and return its path."""
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(world / "model")},
        "data": {"path": str(world / "data/sft.jsonl")},
        "trainer": {"steps": 3, "batch_size": 8},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(patient(tree | sections)))
    return path
