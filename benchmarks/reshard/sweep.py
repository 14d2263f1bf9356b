"""Runs the benchmark of `make bench`: layouts that divide, layouts that do not, pipeline stages, and experts.

python -m benchmarks.reshard.sweep benchmarks/results/reshard.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import psutil

from benchmarks.reshard.contender import HandOver
from benchmarks.reshard.measure import MeasuredReport
from benchmarks.reshard.show import COLUMNS, SUMMARY, LeftOut, left_out_rows, markdown, print_table, rows, summary_rows


@dataclass(frozen=True, slots=True)
class Run:
    """One torchrun command of the sweep."""

    ranks: int
    layouts: tuple[tuple[str, str], ...]
    """(--train, --gen) per layout."""
    options: str = ""
    model: str = "synthetic:216"

    def arguments(self, hand_over: str) -> str:
        """Return the arguments of torchrun, as one string."""
        train, gen = zip(*self.layouts, strict=True)
        command = f"--nproc-per-node {self.ranks} -m benchmarks.reshard --model {self.model} {COMMON}"
        layouts = f"--train {' '.join(train)} --gen {' '.join(gen)}"
        return " ".join(filter(None, (command, self.options, f"--hand-over {hand_over}", layouts)))


COMMON = "--strategies all --repeats 5 --bucket-mb 32 --json"
NO_FULL_GATHER = "--skip ds_chat hybridflow_v"
RUNS = (
    Run(8, (("tp=4,dp=2", "tp=2"),)),
    Run(8, (("tp=2,dp=4,ep=4,etp=1", "tp=2"),), NO_FULL_GATHER, "synthetic-moe:216"),
    Run(6, (("tp=3,dp=2", "tp=2"),), NO_FULL_GATHER),
    Run(8, (("pp=2,tp=2,dp=2", "tp=2"),), NO_FULL_GATHER),
    Run(8, (("tp=4,dp=2", "tp=4"), ("tp=2,dp=4", "tp=4")), NO_FULL_GATHER),
)
LIMIT_SECONDS = 1800

INTRODUCTION = """\
# Weight sync, strategy by strategy

Written by `make bench` on one node with {cores} CPU cores and {memory:.0f} GiB of memory, over gloo. The load average
of the last 15 minutes was {load[0]:.1f} at the start and {load[1]:.1f} at the end: ranks share the cores with each
other and with whatever else runs. Layouts are pp-tp-dp -> pp-tp, MB are 10^6 bytes, the models are in bfloat16:
`synthetic:216` is dense, `synthetic-moe:216` has 24 experts in all layers but the first, trained with ep 4 and etp 1.

Bytes, messages, collectives and memory are counted at the calls and do not depend on the hardware; except for
`megatron_core`, the run fails if they differ from the plan. Seconds are the median of 5 syncs with changed weights and
their spread, after one sync to warm up; all received bits of all syncs were compared. `x` is the median time of a
baseline divided by that of the strategy, in the same run and with the same hand-over. "CPU s" is the CPU time of all
ranks together in the median sync. Times compare strategies on one machine and do not predict times over NCCL.

- `gather_hf`: every rank gathers all tensors in full, those of a bucket together, and keeps its engine's part, as slime
  does. `gather_hf_serial`: the same, one tensor after another.
- `megatron_core`: `megatron.core.resharding` of the installed megatron-core between two of its models, dense ones only.
  Its memory is a lower bound. `nccl_m2n`: the same with NVIDIA's NCCL M2N as its backend.
- `exact_consecutive`: the plan of `exact` on the engine placement of `gather_hf` and `megatron_core`, which tells the
  effects of plan and placement apart. `exact` and `micro_dp` place engines where most of their weights already are.
- Hand-over `direct`: the engine's parameters are in the rank's own process. `shared-memory`: each rank passes the
  weights on in buckets that SGLang's processes map; `megatron_core` too, from its destination model. All keep their
  buckets from sync to sync.
- "MB in bound": the bytes that a rank needs and does not hold, with the engine placement of that strategy.
"""


@dataclass
class Page:
    """Results with one hand-over."""

    hand_over: str
    reports: list[MeasuredReport] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """The commands that were run, each with its table, as Markdown."""

    def add(self, run: Run) -> None:
        """Run the layouts of one command and add what was measured."""
        arguments = run.arguments(self.hand_over)
        print(f"torchrun {arguments}", flush=True)
        found, left_out = _measure(arguments.split())
        print_table(found)
        self.reports += found
        self.details.append(f"```\ntorchrun {arguments}\n```\n")
        for train, gen in dict.fromkeys((r.train, r.gen) for r in found):
            of_layout = [r for r in found if (r.train, r.gen) == (train, gen)]
            missing = [each for each in left_out if (each.train, each.gen) == (train, gen)]
            self.details.append(markdown(COLUMNS, [*rows(of_layout), *left_out_rows(missing)]))

    def parts(self) -> list[str]:
        """Return the parts of the page: a summary, then the details."""
        return [f"## Hand-over: {self.hand_over}\n", markdown(SUMMARY, summary_rows(self.reports)), *self.details]


def main(file: Path) -> None:
    """Run all layouts with both hand-overs and print the tables; `file` has those of the runs so far."""
    load = os.getloadavg()[2]
    pages = [Page(hand_over) for hand_over in get_args(HandOver)]
    file.parent.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(RUNS):
        for page in pages:
            page.add(run)
        parts = [part for page in pages for part in page.parts()]
        if missing := [layout for run in RUNS[number + 1 :] for layout in run.layouts]:
            parts.insert(0, f"Interrupted before: {'; '.join(f'{train} -> {gen}' for train, gen in missing)}.\n")
        file.write_text("\n".join([_introduction((load, os.getloadavg()[2])), *parts]))
    print(f"written to {file}")


def _measure(arguments: list[str]) -> tuple[list[MeasuredReport], list[LeftOut]]:
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
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reports = [MeasuredReport(**line) for line in lines if "left_out" not in line]
    return reports, [LeftOut(**line) for line in lines if "left_out" in line]


def _introduction(load: Sequence[float]) -> str:
    cores = len(psutil.Process().cpu_affinity() or [])
    memory = psutil.virtual_memory().total / 2**30
    return INTRODUCTION.format(cores=cores, memory=memory, load=load)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write the tables, as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments().file)
