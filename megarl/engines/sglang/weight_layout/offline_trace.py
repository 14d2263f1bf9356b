"""Weight layouts of an engine that does not run: to plan before it starts, or for layouts of any size.

trace_layouts() --- request --> child process with the engine's environment: `trace_child`
   |            <-- traces ---  (SGLang's own models on the meta device)
   '--- cache folder, keyed by everything that the traces depend on
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from megarl.cluster.process.atomic_files import atomic_write
from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.engine_environment import make_engine_environment
from megarl.engines.sglang.weight_layout import trace_child
from megarl.engines.sglang.weight_layout.engine_trace import EngineTrace, read_traces
from megarl.engines.sglang.weight_update.planned_boxes import read_expected_tensors
from megarl.engines.unsupported_options import find_build_problems
from megarl.errors import DataError, WeightSyncError
from megarl.model_files.json_object import JsonObject
from megarl.model_files.model_config import config_file, read_model_config
from megarl.reshard.layout.layout import WeightLayout

CHILD_SECONDS = 600.0
MAX_STDERR_LINES = 15
MAX_TOTAL_TOKENS = 4096
"""KV cache size, set so that SGLang does not query the node's memory."""


def trace_layouts(
    model_path: str,
    *,
    tp: int,
    ep: int = 1,
    options: Mapping[str, object] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> list[WeightLayout]:
    """Return the weight layout of each TP rank of an engine.

    Args:
        model_path: a model folder, of which config.json is sufficient, or a config.json under any name.
        options: further options of SGLang that change layouts, `EngineConfig.layout_options`.
        device: device of the engine. On `cpu`, SGLang pads heads that the ranks cannot divide evenly; on other devices
            several ranks hold the same key-value heads.

    Raises:
        DataError: config.json or a key that SGLang needs is missing, or SGLang cannot build its model.
        WeightSyncError: part of a parameter would not be written.
    """
    path, config = Path(model_path), read_model_config(model_path)
    machine = device if torch.cuda.is_available() else "cpu"  # layouts for CUDA are traced on CPU if there is no GPU
    problems = find_build_problems(config, machine, origin=str(config_file(path)))
    if problems:
        raise DataError("\n".join(problems))
    spec = EngineSpec(
        model_path="",
        tp=tp,
        device=device,
        dtype=dtype,
        max_total_tokens=MAX_TOTAL_TOKENS,
        extra_args={**(options or {}), **({"ep_size": ep} if ep > 1 else {})},
    )
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    expected = read_expected_tensors(model_path) if has_weights else {}
    tensors = [[name, list(e.shape), e.dtype] for name, e in expected.items() if e.required or e.is_untrained]
    request = {"config": config, "spec": asdict(spec), "tensors": tensors, "machine": machine}
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = caches / "megarl" / "layouts" / f"{_key(request)}.traces"
    return [trace.layout for trace in read_traces(cached) or trace_in_child(request, cached)]


def trace_in_child(request: JsonObject, cached: Path) -> list[EngineTrace]:
    """Trace the loading of the weights in a child process, and write the result to `cached`."""
    with tempfile.TemporaryDirectory(prefix="megarl-trace-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(request["config"]))
        spec = request["spec"] | {"model_path": folder}
        request_file, traces_file, error_file = (Path(folder) / name for name in ("request", "traces", "error"))
        request_file.write_text(json.dumps(request | {"spec": spec}))
        environment = os.environ | make_engine_environment(request["machine"], spec["tp"])
        command = [sys.executable, "-m", trace_child.__name__, str(request_file), str(traces_file), str(error_file)]
        try:
            child = subprocess.run(  # noqa: S603 -- this interpreter, a module of ours
                command, env=environment, capture_output=True, timeout=CHILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as e:
            raise WeightSyncError(f"SGLang's weight layout could not be traced within {CHILD_SECONDS:.0f} s") from e
        if error_file.exists():
            raise WeightSyncError(error_file.read_text())
        traces = read_traces(traces_file)
        if traces is None:
            stderr = "\n".join(child.stderr.decode(errors="replace").strip().splitlines()[-MAX_STDERR_LINES:])
            raise DataError(
                f"SGLang could not build the model of config.json (exit code {child.returncode}):\n{stderr}"
            )
        # without a cache, each call traces again
        with suppress(OSError), atomic_write(cached) as draft:
            shutil.copyfile(traces_file, draft)
    return traces


def _key(request: JsonObject) -> str:
    content = {
        "request": request,
        "packages": {name: importlib.metadata.version(name) for name in ("sglang", "transformers", "torch")},
        # of this package, which determines the content and the file format of traces
        "code": [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
