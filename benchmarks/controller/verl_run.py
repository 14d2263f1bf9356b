"""Runs verl's dispatch on the sizes of a measured workload, in an environment of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.controller.cluster import NUM_PROCESSES
from benchmarks.controller.measure import DISPATCHES, ControllerReport, Workload
from megarl.errors import WorkerError

PROGRAM = Path(__file__).with_name("verl_program.py")
REQUIREMENTS = Path(__file__).with_name("verl.txt")


def add_verl(report: ControllerReport, work: Workload, python: Path, store_bytes: int) -> ControllerReport:
    """Return the report with verl's cost to bring as many bytes of samples to as many ranks.

    verl's samples are all of the mean length and need no padding, which they otherwise would.

    Args:
        python: of verl's environment.
        store_bytes: size of Ray's object store.

    Raises:
        WorkerError: the program failed; the message ends with its output.
    """
    spec = {
        "ranks": work.ranks,
        "replicas": work.replicas,
        "trajectories_per_replica": work.trajectories // work.replicas,
        "tokens": report.tokens_per_trajectory,
        "processes": NUM_PROCESSES,
        "repetitions": DISPATCHES,
        "store_bytes": store_bytes,
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(PROGRAM), json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkerError(f"verl failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    cpu_seconds = statistics.median(each["cpu_seconds"] for each in found)
    return replace(
        report,
        peer_dispatch_mb=statistics.median(each["bytes"] for each in found) / 1e6,
        peer_dispatch_cpu_ms_per_mb=1000 * cpu_seconds / report.sample_mb,
    )
