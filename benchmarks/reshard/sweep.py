"""The benchmark of `make bench`: a divisible layout, and one that only `exact` serves with few bytes.

python -m benchmarks.reshard.sweep benchmarks/results/reshard.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.reshard.show import markdown, print_table
from megarl.reshard.report import SyncReport

RUNS = (
    (8, "--model synthetic:64 --train pp=1,tp=4,dp=2 --gen pp=1,tp=2 --strategies all"),
    (6, "--model synthetic:64 --train pp=1,tp=3,dp=2 --gen pp=1,tp=2 --strategies gather_hf exact"),
)
COMMON = "--repeats 5 --bucket-mb 8 --json"
LIMIT_SECONDS = 300

INTRODUCTION = """\
# Weight sync, strategy by strategy

Written by `make bench` on one machine with {cores} CPU cores and {memory:.0f} GiB of memory, over gloo.
MB are 10^6 bytes, bfloat16. Bytes, messages and memory are counted at the calls, equal the plan's (a run fails
otherwise) and are the same on any machine; seconds compare strategies of one run, and say nothing about NCCL. Every bit
that arrived was compared, in 5 syncs with changed weights. In `gather_hf`, the first rank of each engine gathers and
writes all of the engine's ranks.
"""


def main(file: Path) -> None:
    """Run, print, write."""
    parts = [_introduction()]
    for ranks, options in RUNS:
        arguments = f"--nproc-per-node {ranks} -m benchmarks.reshard {options} {COMMON}"
        print(f"torchrun {arguments}", flush=True)
        reports = _run(arguments.split())
        print_table(reports)
        parts.append(f"```\ntorchrun {arguments}\n```\n\n{markdown(reports)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts))
    print(f"written to {file}")


def _run(arguments: list[str]) -> list[SyncReport]:
    torchrun = Path(sys.executable).with_name("torchrun")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(torchrun), "--standalone", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
        env=environment,
        check=True,
    )
    return [SyncReport(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def _introduction() -> str:
    cores = len(psutil.Process().cpu_affinity() or [])
    memory = psutil.virtual_memory().total / 2**30
    return INTRODUCTION.format(cores=cores, memory=memory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
