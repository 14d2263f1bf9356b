"""A scheduler's process imports the file of one model, then waits for device memory before its time limit counts."""

import asyncio
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang import engine_host, scheduler_process
from megarl.engines.sglang.engine_host import EngineHost
from megarl.engines.sglang.scheduler_process import (
    ALLOWED_MESSAGE,
    FALLBACK,
    VARIABLE,
    WAITING_MESSAGE,
    SchedulerProcess,
    StartGate,
    find_other_models,
    skip_other_models,
    wait_at_gate,
)
from megarl.errors import WorkerError
from tests.rollout.clock import in_event_loop, iterate, jump
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

FAMILIES = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral"}
FAMILIES |= {"Gemma2": "gemma2", "DeepseekV3": "deepseek_v2"}
"""Architecture in config.json of each family, without `ForCausalLM` -> file of SGLang that defines its class."""


def models_folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SGLang's sources")
    return Path(spec.submodule_search_locations[0]) / "srt/models"


@pytest.mark.parametrize(("family", "file"), FAMILIES.items())
def test_the_file_of_each_family_is_imported(family: str, file: str) -> None:
    folder = models_folder()
    skipped = find_other_models(folder, [f"{family}ForCausalLM"])
    assert {path.stem for path in folder.glob("*.py")} - set(skipped) == {file, FALLBACK}


def test_nothing_is_skipped_for_an_unknown_model(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class One: ...\n")
    (tmp_path / "two.py").write_text("class OneMore: ...\nclass Two(One): ...\n")
    assert find_other_models(tmp_path, ["One"]) == ["two"]
    assert find_other_models(tmp_path, ["One", "Two"]) == []
    assert find_other_models(tmp_path, ["Three"]) == find_other_models(tmp_path, []) == []


def test_a_choice_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setenv(VARIABLE, "grok")
    skip_other_models(str(tmp_path))
    assert os.environ[VARIABLE] == "grok"
    monkeypatch.delenv(VARIABLE)
    skip_other_models(str(tmp_path))
    assert {"llama", "grok"} & set(os.environ[VARIABLE].split(",")) == {"grok"}


def is_closed(path: str) -> bool:
    with Path(path).open("rb") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def test_schedulers_wait_until_the_gate_is_open(tmp_path: Path) -> None:
    """They are threads here: locks of files belong to their descriptors."""
    gate, events = StartGate(), list[str]()
    path = gate.close(str(tmp_path))

    def pass_gate() -> None:
        arrived.wait(HANG_SECONDS)
        wait_at_gate(path)
        events.append("passed")

    arrived = threading.Barrier(3)
    waiting = [threading.Thread(target=pass_gate, daemon=True) for _ in range(2)]
    for thread in waiting:
        thread.start()
    arrived.wait(HANG_SECONDS)
    waiting[0].join(0.05)
    assert is_closed(path)
    events.append("open")
    gate.open()
    for thread in waiting:
        thread.join(HANG_SECONDS)
    assert events == ["open", "passed", "passed"]
    assert not is_closed(path)


def test_a_gate_that_was_opened_stays_open(tmp_path: Path) -> None:
    gate = StartGate()
    gate.open()
    assert not is_closed(gate.close(str(tmp_path)))
    asyncio.run(asyncio.wait_for(gate.wait_open(), HANG_SECONDS))


class FakeSglang(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides empty modules named `sglang...` and records when they are imported and used."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sglang") else None

    def exec_module(self, module: Any) -> None:
        self.events.append(f"import {module.__name__}")
        module.run_scheduler_process = lambda *_: self.events.append("run")


def test_a_scheduler_waits_after_its_imports_and_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [FakeSglang(events), *sys.meta_path])
    for module in (
        "cpu.batching.use_batched_attention_on_cpu",
        "cpu.determinism.install_cpu_kernels",
        "cpu.batching.use_absorbed_mla_on_cpu",
        "cpu.batching.use_shared_prefill_on_cpu",
        "request_runner.send_versions_with_partial_outputs",
        "scheduler_process.idle_on_cpu",
        "scheduler_process.capture_routes_on_cpu",
        "scheduler_process.fit_route_buffer",
    ):
        monkeypatch.setattr(f"megarl.engines.sglang.{module}", lambda: None)
    monkeypatch.setattr(scheduler_process, "wait_at_gate", lambda path: events.append(f"wait at {path}"))
    monkeypatch.setattr(scheduler_process.os, "_exit", lambda code: None)
    before = set(sys.modules)
    SchedulerProcess("logs", "gate")()
    for name in set(sys.modules) - before:
        del sys.modules[name]  # monkeypatch would put it back at the end
    assert events[-2:] == ["wait at gate", "run"]
    assert {"import sglang.srt.managers.scheduler", "import sglang.srt.models.registry"} <= set(events[:-2])


@in_event_loop
async def test_the_time_limit_of_a_start_counts_from_the_opened_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = StartGate()
    monkeypatch.setattr(engine_host, "PROCESS_GATE", gate)
    monkeypatch.setattr(EngineHost, "_run", lambda self, ready: None)  # never ready
    spec = EngineSpec(model_path="", waits_for_memory=True, start_timeout_seconds=UNREACHED_SECONDS)
    start = asyncio.ensure_future(EngineHost(spec).start())
    await iterate()
    jump(2 * UNREACHED_SECONDS)
    await iterate()
    assert not start.done()
    gate.open()
    await iterate()
    assert not start.done()
    while not start.done():
        jump(UNREACHED_SECONDS)
        await asyncio.sleep(0.01)
    with pytest.raises(WorkerError, match=rf"did not start within {UNREACHED_SECONDS} s"):
        await start


def assert_waited_before_allocating(log: str) -> None:
    """Assert from a scheduler's log at level `info` that it loaded its model after it had waited for memory."""
    order = [log.index(message) for message in (WAITING_MESSAGE, ALLOWED_MESSAGE, "Load weight begin")]
    assert order == sorted(order)
