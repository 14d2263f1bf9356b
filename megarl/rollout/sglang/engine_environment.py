"""The environment variables of an engine process. Imports neither SGLang nor torch: the launcher reads it."""

from __future__ import annotations

import os
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
"""Stand-ins for GPU-only wheels; a trainer that saw them would think it had Triton."""

EXPECTED_WARNINGS = (
    "Only CUDA",  # SGLang's, of quantization methods that the CPU engine never uses
    "Triton is not supported on current platform",
    "resource_tracker",  # the schedulers are ended with SIGKILL, their semaphores go with the tracker
)
"""How warnings begin that say nothing on a machine without CUDA."""


def engine_environment(device: str, tp: int) -> dict[str, str]:
    """Variables that an engine's process needs before it starts; on CUDA none.

    Args:
        device: `cpu` or `cuda`.
        tp: the engine's tensor parallel size.
    """
    if device == "cuda":
        return {}
    folders = [folder for folder in _inherited("PYTHONPATH", os.pathsep) if folder != str(STUBS)]
    ignored = [f"ignore:{message}" for message in EXPECTED_WARNINGS]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(STUBS), *folders]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles its seeded sampler; the compiler trips over the stand-ins
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONWARNINGS": ",".join([*_inherited("PYTHONWARNINGS", ","), *ignored]),
    }
    if tp > 1:
        # SGLang otherwise asks for one NUMA node per rank
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    return variables


def _inherited(name: str, separator: str) -> list[str]:
    return [part for part in os.environ.get(name, "").split(separator) if part]
