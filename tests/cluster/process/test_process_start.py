"""Startup of processes: fast imports, objects left out of garbage collections, and the startup trace."""

import asyncio
import gc
import importlib
import os
import subprocess
import sys
import time
import weakref

import psutil
import pytest
import torch

from megarl.cluster.process import process_start
from megarl.cluster.process.process_start import (
    LOW_PRIORITY,
    StartupTrace,
    compile_on_first_call,
    fast_imports,
    freeze_objects,
    import_at_low_priority,
    record_imports,
)
from megarl.cluster.workers import worker_host
from megarl.cluster.workers.worker_host import AsyncWorkerHost, WorkerHost

compile_calls = []


def double(x, scale=2.0):
    """Return x times the scale."""
    return x * scale


def fake_compile(model, **options):
    compile_calls.append((model, options))
    return model


@pytest.fixture(autouse=True)
def _state_of_the_process(monkeypatch):
    compile_calls.clear()
    monkeypatch.setattr(process_start, "_imports", [])
    yield
    gc.unfreeze()


def test_a_function_is_compiled_once_and_when_it_is_called():
    for decorated in (
        compile_on_first_call(fake_compile, double, dynamic=True),
        compile_on_first_call(fake_compile, dynamic=True)(double),
    ):
        compile_calls.clear()
        assert decorated.__name__ == "double"
        assert compile_calls == []
        assert [float(decorated(torch.tensor(3.0))), float(decorated(torch.tensor(3.0), scale=3.0))] == [6.0, 9.0]
        assert compile_calls == [(double, {"dynamic": True})]


def test_modules_are_compiled_at_once():
    module = torch.nn.Linear(2, 2)
    assert compile_on_first_call(fake_compile, module, mode="default") is module
    assert compile_calls == [(module, {"mode": "default"})]


def test_functions_of_the_block_are_compiled_by_torch():
    with fast_imports():
        compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.arange(3.0)), double(torch.arange(3.0)))
    assert "_torchdynamo_orig_callable" in vars(torch.compile(double, backend="eager"))  # torch's own again


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with fast_imports():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_modules_are_imported_at_low_priority_and_later_work_is_not(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import os, threading\nniceness = os.nice(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = os.nice(0)
    with fast_imports("slow_module"):
        pass
    assert importlib.import_module("slow_module").niceness == max(before, LOW_PRIORITY)
    assert os.nice(0) == before
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_at_low_priority("no_such_module")


def test_megatron_core_is_imported_without_the_compiler():
    code = """
import sys
from megarl.cluster.process.process_start import fast_imports
with fast_imports():
    import megarl.megatron
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
from megarl.cluster.process.process_start import run_adam_without_compiler
run_adam_without_compiler()
{ADAM}
assert "torch._dynamo" not in sys.modules
print(weight.detach().numpy().tobytes().hex())
"""


def test_adam_runs_without_the_compiler_and_with_the_same_bits():
    names = {}
    with torch.random.fork_rng():
        exec(ADAM, names)
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert found == names["weight"].detach().numpy().tobytes().hex()


class Node:
    """An object that refers to itself, so that only a garbage collection frees it."""

    def __init__(self):
        self.own = self


def test_what_was_garbage_is_freed_first_if_asked_for():
    found = weakref.ref(Node())
    freeze_objects(collect=True)
    assert found() is None


def test_later_collections_visit_later_objects_only():
    before = weakref.ref(Node())
    freeze_objects()
    after = weakref.ref(Node())
    gc.collect()
    assert before() is not None
    assert after() is None


@pytest.mark.parametrize("kind", [WorkerHost, AsyncWorkerHost])
def test_a_worker_that_is_built_is_frozen_with_its_process(kind, monkeypatch):
    monkeypatch.setattr(worker_host, "read_process_info", lambda: None)  # in this process, outside of Ray
    host = kind({})
    if isinstance(host, AsyncWorkerHost):
        asyncio.run(host.build(Node, (), {}, 0.0))
    else:
        host.build("role", Node, (), {}, 0.0)
    assert gc.get_freeze_count() > 1000


def test_imports_of_a_call_begin_when_it_was_requested_and_the_process_idle(monkeypatch):
    clock = iter([10.0, 15.0, 16.0, 18.0, 18.5, 20.0, 27.0, 27.0, 30.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    trace = StartupTrace()  # ready at 10
    # called at 15, builds from 16; imports from 18 to 18.5, done at 20
    with trace.record_build(requested_at=4.0), record_imports():
        pass
    with trace.record_build(requested_at=19.0):  # called at 27
        pass
    timing = trace.snapshot()
    assert timing.ready_at == 10.0
    assert timing.imports == ((10.0, 15.0), (18.0, 18.5), (20.0, 27.0))
    assert timing.builds == ((16.0, 20.0), (27.0, 30.0))


def test_process_creation_time(monkeypatch):
    seconds_after_boot = psutil.Process().create_time() - psutil.boot_time()
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: seconds_after_boot + 5000}.get)
    monkeypatch.setattr(time, "time", lambda: 1e6)
    # the time of the boot is in full seconds
    assert process_start.process_creation_time() == pytest.approx(1e6 - 5000, abs=1.5)
