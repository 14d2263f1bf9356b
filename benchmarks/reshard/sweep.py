"""Runs the benchmark of `make bench`: layouts that divide, layouts that do not, and changes of the pipeline size.

python -m benchmarks.reshard.sweep benchmarks/results/reshard.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.reshard.show import COLUMNS, SUMMARY, markdown, print_table, rows, summary_rows
from megarl.reshard.analysis.sync_report import SyncReport


@dataclass(frozen=True, slots=True)
class Run:
    """One torchrun command of the sweep."""

    ranks: int
    layouts: tuple[tuple[str, str], ...]
    """(--train, --gen) per layout."""
    options: str = ""

    @property
    def arguments(self) -> str:
        """Arguments of torchrun, as one string."""
        train, gen = zip(*self.layouts, strict=True)
        arguments = f"--nproc-per-node {self.ranks} -m benchmarks.reshard {COMMON} {self.options} "
        return arguments + f"--train {' '.join(train)} --gen {' '.join(gen)}"


COMMON = "--model synthetic:216 --strategies all --repeats 5 --bucket-mb 32 --json"
NO_FULL_GATHER = "--skip ds_chat hybridflow_v"
RUNS = (
    Run(8, (("tp=4,dp=2", "tp=2"),)),
    Run(
        8,
        (
            ("pp=2,tp=2,dp=2", "tp=2"),
            ("tp=4,dp=2", "tp=4"),
            ("tp=2,dp=4", "tp=4"),
            ("pp=2,tp=4", "pp=2,tp=2"),
        ),
        NO_FULL_GATHER,
    ),
    Run(6, (("tp=3,dp=2", "tp=2"),), NO_FULL_GATHER),
)
LIMIT_SECONDS = 300

INTRODUCTION = """\
# Weight sync, strategy by strategy

Written by `make bench` on one node with {cores} CPU cores and {memory:.0f} GiB of memory, over gloo; the model is
{model}, layouts are pp-tp-dp -> pp-tp. MB are 10^6 bytes, bfloat16.
Bytes, messages, collectives and memory are counted at the calls and do not depend on the hardware; except for
`megatron_core`, the run fails if they differ from the plan. Seconds compare strategies on one layout and do not predict
times over NCCL; `x` is the time of a baseline divided by the time of the strategy. All received bits were verified, in
5 syncs with changed weights.

- `gather_hf`, the method of verl and slime: every rank gathers all tensors in full, one by one, and keeps its engine's
  part.
- `megatron_core`: `megatron.core.resharding` of the installed megatron-core between two of its models. Its memory is a
  lower bound.
- The engine's parameters are in the rank's own process, as for `megatron_core`; `--hand-over shared-memory` puts them
  behind the buckets that SGLang's processes read. `gather_hf` uses such buckets in both cases.
- "MB in bound": the bytes that a rank needs and does not hold, with the engine placement of that strategy.
"""


def main(file: Path) -> None:
    """Run all layouts, print the tables and write them to `file`."""
    reports, parts = [], []
    for run in RUNS:
        print(f"torchrun {run.arguments}", flush=True)
        found = _measure(run.arguments.split())
        print_table(found)
        parts.append(f"```\ntorchrun {run.arguments}\n```\n")
        layouts = dict.fromkeys((r.train, r.gen) for r in found)
        parts += [markdown(COLUMNS, rows([r for r in found if (r.train, r.gen) == layout])) for layout in layouts]
        reports += found
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([_introduction(reports[0]), markdown(SUMMARY, summary_rows(reports)), *parts]))
    print(f"written to {file}")


def _measure(arguments: list[str]) -> list[SyncReport]:
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


def _introduction(report: SyncReport) -> str:
    cores = len(psutil.Process().cpu_affinity() or [])
    memory = psutil.virtual_memory().total / 2**30
    return INTRODUCTION.format(cores=cores, memory=memory, model=report.model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
