"""Imports without garbage collections, and torch.compile that waits for the first call."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.process.fast_imports import LOW_PRIORITY, compile_on_first_call, fast_imports, import_at_low_priority

compile_calls: list[Any] = []


def double(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Return x times the scale."""
    return x * scale


def fake_compile(model: Any, **options: Any) -> Any:
    compile_calls.append((model, options))
    return model


@pytest.fixture(autouse=True)
def no_calls() -> None:
    compile_calls.clear()


def test_a_function_is_compiled_once_and_when_it_is_called() -> None:
    for decorated in (
        compile_on_first_call(fake_compile, double, dynamic=True),
        compile_on_first_call(fake_compile, dynamic=True)(double),
    ):
        compile_calls.clear()
        assert decorated.__name__ == "double"
        assert compile_calls == []
        assert [float(decorated(torch.tensor(3.0))), float(decorated(torch.tensor(3.0), scale=3.0))] == [6.0, 9.0]
        assert compile_calls == [(double, {"dynamic": True})]


def test_modules_are_compiled_at_once() -> None:
    module = torch.nn.Linear(2, 2)
    assert compile_on_first_call(fake_compile, module, mode="default") is module
    assert compile_calls == [(module, {"mode": "default"})]


def test_functions_of_the_block_are_compiled_by_torch() -> None:
    with fast_imports():
        compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.arange(3.0)), double(torch.arange(3.0)))
    assert "_torchdynamo_orig_callable" in vars(torch.compile(double, backend="eager"))  # torch's own again


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with fast_imports():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_modules_are_imported_at_low_priority_and_later_work_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text("import os, threading\nniceness = os.nice(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = os.nice(0)
    with fast_imports("slow_module"):
        pass
    assert importlib.import_module("slow_module").niceness == max(before, LOW_PRIORITY)
    assert os.nice(0) == before
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_at_low_priority("no_such_module")


def test_megatron_core_is_imported_without_the_compiler() -> None:
    code = """
import sys
from megarl.process.fast_imports import fast_imports
with fast_imports():
    import megatron.core
from megatron.core.fusions.fused_bias_swiglu import swiglu
import torch
assert "torch._inductor.compile_fx" not in sys.modules
assert hasattr(swiglu, "__wrapped__")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


ADAM = """
import sys, torch
torch.manual_seed(0)
weight, calls = torch.nn.Parameter(torch.randn(7, 5)), []
optimizer = torch.optim.AdamW([weight], lr=0.1)
optimizer.register_step_post_hook(lambda *_: calls.append("post"))
for _ in range(3):
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert calls == ["post"] * 3 and torch.is_grad_enabled()
"""
WITHOUT_COMPILER = f"""
from megarl.process.fast_imports import run_adam_without_compiler
run_adam_without_compiler()
{ADAM}
assert "torch._dynamo" not in sys.modules
print(weight.detach().numpy().tobytes().hex())
"""


def test_adam_runs_without_the_compiler_and_with_the_same_bits() -> None:
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(ADAM, names)
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert found == names["weight"].detach().numpy().tobytes().hex()
