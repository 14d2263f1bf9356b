"""A run whose engine, tracker, optimizer and learning-rate decay are a user's: the example's engine on transformers.

The model has gated delta nets, which SGLang does not run on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launched import list_steps, run_program
from tests.end_to_end.test_families import save_with_tokenizer
from tests.end_to_end.tiny_world import LR, write_run

EXAMPLE = Path(__file__).parents[2] / "examples/custom-engine"

PARTS = """
import json

import torch

def square(done):
    return (1 - done) ** 2

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, *, scale):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"] * group["scale"])

class Last:
    def __init__(self, run_dir, step):
        self.path = run_dir / "last.json"

    def log(self, metrics, *, step):
        self.path.write_text(json.dumps({"step": step, "lr": metrics["learning_rate"]}))

    def close(self):
        pass
"""


SIGNS = {"type": "parts:Signs", "kwargs": {"scale": 0.5}}


def test_a_run_with_parts_from_outside(world, tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    config = write_run(
        world,
        tmp_path,
        model={"path": str(save_with_tokenizer("qwen3_5", tmp_path, world))},
        trainer={"steps": 3, "optimizer": {"lr": LR, "decay": "parts:square"} | SIGNS},
        rollout={"max_new_tokens": 12, "engine": {"type": "transformers_engine:TransformersEngine"}, "replicas": 2},
        weight_sync={"strategy": "gather_hf"},
        tracking={"tensorboard": False, "sinks": [{"path": "parts:Last"}]},
    )
    paths = os.pathsep.join(filter(None, [str(EXAMPLE), str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = run_program(sys.executable, "-m", "megarl", "train", config, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    # transformers and the trainer compute the same; pushed weights would otherwise differ from the second step on
    assert max(row["train_infer_mismatch/logprob_abs_max"] for row in rows) < 1e-4
    assert [row["policy_version/min"] for row in rows] == [0, 1, 2]
    assert rows[2]["learning_rate"] == pytest.approx(LR * (1 / 3) ** 2)
    assert json.loads((tmp_path / "run/last.json").read_text()) == {"step": 3, "lr": rows[2]["learning_rate"]}
