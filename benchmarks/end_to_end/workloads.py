"""The workloads on which trainers are compared: a model, prompts, and how many tokens completions have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.chaos.prepare import prepare_demo
from megarl.config import RunConfig, load_config
from megarl.data.tiny_checkpoint import write_tiny_model

GROUP_SIZE, PROMPTS_PER_STEP, UPDATES_PER_STEP = 8, 32, 2
"""All workloads sample 256 completions a step and make two updates of 128."""

LEARNING_RATE = 1e-6
"""So low that the policy, and with it the length of completions, stays as it is."""

DEMO = Path("yaml/demo.yaml")

LONG_TAIL_VOCABULARY = 352
"""A random model chooses tokens almost uniformly, also the one that ends a completion: lengths are geometric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both trainers run."""

    name: str
    model: Path
    """Folder of the model and its tokenizer."""
    prompts: tuple[str, ...]
    """Prompts of all steps."""
    max_new_tokens: int
    warmup_steps: int
    """First steps of each run, which are not counted."""
    steps: int
    """Steps of each run after these."""


def make_toy(folder: Path, notify: Callable[[str], None]) -> Workload:
    """Return the demo's word problems and fine-tuned model, which answers in about 13 tokens."""
    overrides = prepare_demo(load_config(RunConfig, DEMO), folder, notify)
    config = load_config(RunConfig, DEMO, overrides)
    rows = map(json.loads, Path(config.data.file).read_text().splitlines())
    return Workload(
        name="toy",
        model=Path(config.model.path),
        prompts=tuple(row["prompt"] for row in rows),
        max_new_tokens=24,
        warmup_steps=4,
        steps=20,
    )


def make_long_tail(folder: Path, notify: Callable[[str], None]) -> Workload:
    """Return a random model of two layers whose completions have geometric lengths of mean 270, at most 512."""
    notify(f"writing a random model with {LONG_TAIL_VOCABULARY} tokens")
    generator = np.random.default_rng(0)
    prompts = tuple("".join(chr(97 + c) for c in generator.integers(0, 26, 12)) for _ in range(64))
    write_tiny_model(folder / "model", prompts, 0, vocab_size=LONG_TAIL_VOCABULARY, context_length=640)
    return Workload(
        name="long_tail", model=folder / "model", prompts=prompts, max_new_tokens=512, warmup_steps=1, steps=3
    )


WORKLOADS: dict[str, Callable[[Path, Callable[[str], None]], Workload]] = {
    "toy": make_toy,
    "long_tail": make_long_tail,
}
