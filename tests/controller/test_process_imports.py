"""What each kind of process imports before it is needed: imports are most of the time to the first completion."""

import json
import subprocess
import sys

HEAVY = ("torch", "torch._inductor.compile_fx", "transformers", "megatron.core", "sglang", "scipy", "tensorboard")
"""Modules that take from 0.1 to 5 seconds of CPU time to import."""


def heavy_modules(*statements: str) -> list[set[str]]:
    """Return the modules of `HEAVY` that a new interpreter has imported after each of the statements."""
    look = f"\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))\n"
    code = "import json, sys\n" + look.join((*statements, ""))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def test_heavy_modules_are_imported_late():
    light = (
        "import megarl.controller.run_stage",  # the driver, until its checks
        # it imports torch once all other processes are requested, and transformers to read the prompts
        "import megarl.controller.recovery",
        # a rollout worker until it loads the tokenizer; torch only for the estimates, after the first completions
        "import megarl.run.remote.rollout_actor",
        "import megarl.cluster.workers.worker_host, megarl.megatron.trainer_worker",  # a trainer rank until it is built
    )
    engine_host = "import megarl.engines.sglang.sglang_engine"
    *before, of_engine_host = heavy_modules(*light, engine_host)
    assert {statement: found for statement, found in zip(light, before, strict=True) if found} == {}
    assert of_engine_host <= {"torch"}


def test_trainer_rank_on_cpu_imports_neither_compiler_nor_transformers():
    build = "from megarl.megatron.runtime import platform\nplatform.prepare()\nimport megarl.megatron.training.trainer"
    (found,) = heavy_modules(build)
    assert found <= {"torch", "megatron.core", "tensorboard"}


def test_torch_compile_works_after_megatron_was_imported_without_it():
    check = "import torch\nbefore = torch.compile\nplatform.prepare()\nassert torch.compile is before"
    (found,) = heavy_modules(f"from megarl.megatron.runtime import platform\n{check}")
    assert "torch" in found
