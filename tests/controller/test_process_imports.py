"""What each kind of process imports before it is needed: imports are most of the time to the first completion."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "torch._inductor.compile_fx", "transformers", "megatron.core", "sglang", "scipy", "tensorboard")
"""Modules that take from 0.1 to 5 seconds of CPU time to import."""


def heavy_modules(statements: str) -> set[str]:
    """Return the modules of `HEAVY` that a new interpreter has imported after it has run the statements."""
    code = f"{statements}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("process", "modules", "expected"),
    [
        ("driver until its checks", "megarl.controller.run_stage", set()),
        # it imports torch once all other processes are requested, and transformers to read the prompts
        ("controller until it requests processes", "megarl.controller.recovery", set()),
        # torch only for the estimates, which follow the first completions
        ("rollout worker until it loads the tokenizer", "megarl.groups.rollout_actor", set()),
        ("trainer rank until it is built", "megarl.workers.worker_host, megarl.megatron.trainer_worker", set()),
        ("engine host until it launches", "megarl.rollout.sglang.sglang_engine", {"torch"}),
    ],
)
def test_heavy_modules_are_imported_late(process: str, modules: str, expected: set[str]) -> None:
    assert heavy_modules(f"import {modules}") <= expected, process


def test_trainer_rank_on_cpu_imports_neither_compiler_nor_transformers() -> None:
    build = "from megarl.megatron.runtime import platform\nplatform.prepare()\nimport megarl.megatron.training.trainer"
    assert heavy_modules(build) <= {"torch", "megatron.core", "tensorboard"}


def test_torch_compile_works_after_megatron_was_imported_without_it() -> None:
    check = "import torch\nbefore = torch.compile\nplatform.prepare()\nassert torch.compile is before"
    assert "torch" in heavy_modules(f"from megarl.megatron.runtime import platform\n{check}")
