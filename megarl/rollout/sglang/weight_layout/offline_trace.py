"""The weight layouts of an engine that does not run: for plans made before it starts, and for layouts of any size.

trace_layouts() ---- request ----> child process with the engine's environment: `trace_child`
<--- traces -----  (SGLang's own models on the meta device)
'--- cache folder, by everything that the traces depend on
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megarl.errors import DataError, WeightSyncError
from megarl.model_files.json_object import read_json_object
from megarl.reshard.layout.layout import WeightLayout
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.engine_environment import engine_environment
from megarl.rollout.sglang.weight_layout import (
    coverage,
    engine_trace,
    layer_dedup,
    load_recorder,
    trace_child,
    trace_file,
)
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, trace_live
from megarl.rollout.sglang.weight_layout.trace_file import read_traces
from megarl.rollout.sglang.weight_update.expected_tensors import read_manifest

__all__ = ["EngineTrace", "trace_engine", "trace_layouts", "trace_live"]

CODE = (coverage, engine_trace, layer_dedup, load_recorder, trace_child, trace_file)
"""Modules that decide what a trace is, and how it is stored."""

CHILD_SECONDS = 600.0
LAST_LINES = 15
MAX_TOTAL_TOKENS = 4096
"""SGLang otherwise looks at the machine's memory."""


def trace_layouts(
    model_path: str, *, tp: int, ep: int = 1, device: str = "cpu", dtype: str = "float32"
) -> list[WeightLayout]:
    """What each TP rank of an engine would hold, by rank.

    Args:
        model_path: a model folder, of which config.json is enough, or a config.json under any name.
        device: of the engine: on `cpu`, SGLang pads heads that the ranks cannot share evenly, elsewhere several
            ranks hold the same keys and values.

    Raises:
        DataError: there is no config.json, or SGLang cannot build its model.
        WeightSyncError: part of a parameter would get no value.
    """
    return [trace.layout for trace in trace_engine(model_path, tp=tp, ep=ep, device=device, dtype=dtype)]


def trace_engine(
    model_path: str, *, tp: int, ep: int = 1, device: str = "cpu", dtype: str = "float32"
) -> list[EngineTrace]:
    """As `trace_layouts`, with what layouts do not tell: padding and derived values."""
    config, tensors = _read_model(model_path)
    spec = EngineSpec(
        model_path="",
        tp=tp,
        device=device,
        dtype=dtype,
        max_total_tokens=MAX_TOTAL_TOKENS,
        extra_args={"ep_size": ep} if ep > 1 else {},
    )
    request = {"spec": asdict(spec), "tensors": tensors}
    cached = _cache_folder() / f"{_key(config, request)}.npz"
    return read_traces(cached) or _ask_child(config, request, cached)


def _read_model(model_path: str) -> tuple[str, list[Any]]:
    """The text of config.json, and the checkpoint's tensors if the folder has any."""
    path = Path(model_path)
    config = json.dumps(read_json_object(path / "config.json" if path.is_dir() else path))
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return config, []
    manifest = read_manifest(model_path)
    return config, [[name, list(e.shape), e.dtype] for name, e in manifest.items() if e.required]


def _ask_child(config: str, request: dict[str, Any], cached: Path) -> list[EngineTrace]:
    with tempfile.TemporaryDirectory(prefix="megarl-trace-") as folder:
        (Path(folder) / "config.json").write_text(config)
        spec = request["spec"] | {"model_path": folder}
        request_file, traces_file, error_file = (Path(folder) / name for name in ("request", "traces.npz", "error"))
        request_file.write_text(json.dumps(request | {"spec": spec}))
        environment = os.environ | engine_environment(_machine(spec["device"]), spec["tp"])
        command = [sys.executable, "-m", trace_child.__name__, str(request_file), str(traces_file), str(error_file)]
        try:
            child = subprocess.run(  # noqa: S603 -- this interpreter, a module of ours
                command, env=environment, capture_output=True, timeout=CHILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as e:
            raise WeightSyncError(f"SGLang's weight layout was not traced within {CHILD_SECONDS:.0f} s") from e
        if error_file.exists():
            raise WeightSyncError(error_file.read_text())
        traces = read_traces(traces_file)
        if traces is None:
            words = "\n".join(child.stderr.decode(errors="replace").strip().splitlines()[-LAST_LINES:])
            raise DataError(f"SGLang could not build the model of config.json (exit code {child.returncode}):\n{words}")
        _store(cached, traces_file)
    return traces


def _key(config: str, request: dict[str, Any]) -> str:
    content = {
        "config": json.loads(config),
        "request": request,
        "packages": {name: importlib.metadata.version(name) for name in ("sglang", "transformers", "torch")},
        "machine": _machine(request["spec"]["device"]),
        "code": [_text(module) for module in CODE],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _machine(device: str) -> str:
    """What the child runs on; layouts for CUDA are traced anywhere."""
    return device if torch.cuda.is_available() else "cpu"


def _text(module: Any) -> str:
    return Path(module.__file__).read_text()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl" / "layouts"


def _store(cached: Path, traces_file: Path) -> None:
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}")
        shutil.copyfile(traces_file, partial)
        partial.rename(cached)
    except OSError:
        return  # a folder that cannot be written costs a trace each time
