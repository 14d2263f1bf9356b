"""Trains with TRL's GRPOTrainer as a JSON file says. Runs in TRL's environment and does not import megarl."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Records when training begins and when each update ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *arguments: Any, **named: Any) -> None:
        """Record when training begins."""
        self.times.append(time.perf_counter())

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        """Record when an update has ended."""
        self.times.append(time.perf_counter())


class FirstToken:
    """The reward: whether the first sampled token is odd. Records the lengths of all completions."""

    __name__ = "first_token"

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, completion_ids: list[list[int]], **named: Any) -> list[float]:
        """Return one reward per completion."""
        self.lengths += [len(ids) for ids in completion_ids]
        return [float(ids[0] % 2) for ids in completion_ids]


def main() -> None:
    """Train, and write the seconds of each step and the lengths of completions to the spec's `output`."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    num_steps = spec["warmup_steps"] + spec["steps"]
    config = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=num_steps * spec["updates_per_step"],
        per_device_train_batch_size=spec["batch_size"],
        gradient_accumulation_steps=spec["completions_per_update"] // spec["batch_size"],
        generation_batch_size=spec["completions_per_update"] * spec["updates_per_step"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
        save_strategy="no",
        logging_steps=1000,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    clock, reward = Clock(), FirstToken()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, trust_remote_code=False),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in spec["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left", trust_remote_code=False),
        callbacks=[clock],
    )
    trainer.train()
    ends = clock.times[:: spec["updates_per_step"]]
    seconds = [after - before for before, after in pairwise(ends)]
    per_step = len(reward.lengths) // num_steps
    result = {
        "seconds": seconds[spec["warmup_steps"] :],
        "lengths": reward.lengths[spec["warmup_steps"] * per_step :],
    }
    Path(spec["output"]).write_text(json.dumps(result))


main()
