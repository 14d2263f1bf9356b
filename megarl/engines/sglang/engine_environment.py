"""The environment variables of an engine process.

Imports neither SGLang nor torch, because the process that launches engines uses it.
"""

from __future__ import annotations

import os
from pathlib import Path

STUBS_FOLDER = Path(__file__).parent / "stubs"
"""Stub modules for GPU-only wheels, for engine processes only: a trainer would take them for the real Triton."""

EXPECTED_WARNINGS = (
    "Only CUDA",  # from SGLang, about quantization methods that the CPU engine never uses
    "Triton is not supported on current platform",
    "resource_tracker",  # schedulers are stopped with SIGKILL; the tracker then removes their semaphores
)
"""Prefixes of warnings that are expected on a node without CUDA and are ignored there."""


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator of GPU memory."""


def make_engine_environment(device: str, tp: int) -> dict[str, str]:
    """Return the variables that must be set before an engine's process starts.

    Args:
        device: `cpu` or `cuda`.
        tp: tensor-parallel size of the engine.
    """
    if device == "cuda":
        return _without_expandable_segments()
    folders = [folder for folder in _split_variable("PYTHONPATH", os.pathsep) if folder != str(STUBS_FOLDER)]
    ignored = [f"ignore:{message}" for message in EXPECTED_WARNINGS]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(STUBS_FOLDER), *folders]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles its seeded sampler; the compiler fails on the stub modules
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONWARNINGS": ",".join([*_split_variable("PYTHONWARNINGS", ","), *ignored]),
    }
    if tp > 1:
        # SGLang otherwise requires one NUMA node per rank
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    return variables


def _without_expandable_segments() -> dict[str, str]:
    """Return settings of the allocator without expandable segments, which SGLang's memory saver cannot release."""
    found = {name: _split_variable(name, ",") for name in ALLOCATOR_VARIABLES}
    kept = {name: [part for part in parts if "expandable_segments" not in part] for name, parts in found.items()}
    return {name: ",".join(parts) for name, parts in kept.items() if parts != found[name]}


def _split_variable(name: str, separator: str) -> list[str]:
    return [part for part in os.environ.get(name, "").split(separator) if part]
