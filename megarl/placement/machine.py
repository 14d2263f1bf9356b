"""What this machine has, asked without torch."""

from __future__ import annotations

import os
import shutil
import subprocess

QUERY_SECONDS = 20.0
"""How long the driver may take to name its GPUs; a machine that just started needs a few."""


def visible_gpus() -> list[str]:
    """Names of the CUDA devices that a process started here would see; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(  # noqa: S603 -- a fixed command line
            [command, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return names
    ids = [word.strip() for word in chosen.split(",") if word.strip()]
    if all(word.isdigit() for word in ids):
        return [names[int(word)] for word in ids if int(word) < len(names)]
    # GPU-<uuid> and MIG-<uuid>; "-1" hides all.
    return names[: len([word for word in ids if word != "-1"])]
