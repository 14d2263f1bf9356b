"""Measures the controller's CPU and memory in steps of many ranks and trajectories, on fake processes.

python -m benchmarks.controller --ranks 512 --trajectories 16384 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.controller.measure import ControllerReport, Workload, measure
from benchmarks.controller.prompts import prompt_bytes
from benchmarks.controller.verl_run import REQUIREMENTS, add_verl
from benchmarks.local_ray import local_ray
from benchmarks.peer_environment import make_peer_environment
from benchmarks.results_file import write_results
from benchmarks.text_table import markdown_rows
from megarl.cluster.placement.hardware import inline_environment

INTRODUCTION = """\
# CPU and memory of the controller

Measured on a node with {cores} CPU cores:

```
{command}
```

Steps of GRPO with two mini-batches, as `megarl train` runs them on slots that trainer and engines share: the loop, the
groups, the splitting over replicas, the supervision, the checkpoints' bookkeeping and Ray are the product's. Trainer
ranks, rollout workers and engines are fake: a few processes stand in for all of them, answer every call that those of a
run get, and return groups of 8 completions without generating any; lengths are even between half of the longest
response and all of it. Every third step evaluates and saves. CPU seconds are those of all threads of the controller's
process, medians over the steps after the first one, and include the calls of all ranks, which go through relays as in a
run on nodes of 8 ranks. Relays share processes as well; their CPU is that of their nodes, not counted.

- `train call`: training request, micro-batch plan, one stored request per replica, the call of each rank. `step`: all
  of a step, the train call included.
- `calibration`: a fixed program of Python objects, pickles and small arrays in the same process. `step / calibration`
  compares machines.
- `calls a rank`: of each rank in a step, in the mean over all steps.
- `memory`: growth of the controller's anonymous memory over its first step. `prompt`: that of loading prompts of 500
  tokens, per prompt.
- `fetched / used`: tokens of the objects that the replicas fetch over those that they train on. An object has the
  groups that a worker returned together, up to a quarter of a replica's mini-batch: fake groups finish at once, those
  of engines mostly one by one.
- `rank calls`: one call of each rank that gets a kilobyte, of which each replica has its own, and does nothing.
- `samples`: token ids, log-probabilities, masks and versions of a step, 13 bytes a token. `through`: what of them
  passes through the controller: summaries and requests with references in megarl, all samples in verl, which collects
  and dispatches them as DataProto. `per MB`: CPU of the controller, from samples that lie where they were sampled until
  each rank holds its own, over `samples`; in megarl with the micro-batch plan, of which verl makes none.
- Ranks that share a process share references as well: what Ray spends on the references of each process is counted for
  {processes} processes only. Of the ranks of a replica, only the first one gets references to groups.

"""

COLUMNS = (
    "ranks",
    "trajectories",
    "longest response",
    "replicas",
    "train call s",
    "step s",
    "calibration s",
    "step / calibration",
    "calls a rank",
    "memory MB",
    "prompt bytes",
    "fetched / used",
    "rank calls s",
    "samples MB",
    "through MB",
    "per MB ms",
    "verl through MB",
    "verl per MB ms",
)


def main() -> int:
    """Print one report per size to stdout."""
    args = _parser().parse_args()
    lengths = args.response_tokens * (len(args.ranks) if len(args.response_tokens) == 1 else 1)
    if not len(args.ranks) == len(args.trajectories) == len(lengths):
        raise SystemExit("error: --ranks, --trajectories and --response-tokens need equally many numbers")
    python = None
    if args.peer == "verl":
        python = make_peer_environment(args.environment.absolute(), REQUIREMENTS, "verl", _notify, "--no-deps")
    bytes_per_prompt = prompt_bytes(args.prompts)
    reports = []
    for ranks, trajectories, response_tokens in zip(args.ranks, args.trajectories, lengths, strict=True):
        work = Workload(
            ranks=ranks,
            trajectories=trajectories,
            replicas=args.replicas or ranks // 8,
            response_tokens=response_tokens,
            steps=args.steps,
            slow_rank_seconds=args.slow_rank_seconds,
        )
        report = _measure_in_new_cluster(work, bytes_per_prompt, args.store_gb)
        if python is not None:
            report = add_verl(report, work, python, args.store_gb * 2**30)
        print(json.dumps(asdict(report)) if args.json else markdown([report]), flush=True)
        reports.append(report)
    if args.write is not None:
        write_results(args.write, INTRODUCTION, markdown(reports), module="benchmarks.controller", processes=2)
    return 0


def _notify(text: str) -> None:
    print(text, file=sys.stderr)


def _measure_in_new_cluster(work: Workload, bytes_per_prompt: float, store_gb: int) -> ControllerReport:
    environment = {"env_vars": {"PYTHONPATH": os.getcwd(), **inline_environment()}}
    options = {"num_cpus": 4, "object_store_memory": store_gb * 2**30, "runtime_env": environment}
    with local_ray(**options), tempfile.TemporaryDirectory() as scratch:
        return measure(work, Path(scratch), bytes_per_prompt)


def markdown(reports: Sequence[ControllerReport]) -> str:
    """Return the table in Markdown, one row per size."""
    rows = [
        (
            f"{r.ranks:,}",
            f"{r.trajectories:,}",
            f"{r.response_tokens:,}",
            f"{r.replicas:,}",
            f"{r.train_call_cpu_seconds:.2f}",
            f"{r.step_cpu_seconds:.2f}",
            f"{r.calibration_cpu_seconds:.2f}",
            f"{r.step_calibrated:.2f}",
            f"{sum(r.calls_per_rank.values()):.1f}",
            f"{r.rss_mb:.0f}",
            f"{r.prompt_bytes:,.0f}",
            f"{r.fetched_per_used:.2f}",
            f"{r.rank_calls_cpu_seconds:.2f}",
            f"{r.sample_mb:,.0f}",
            f"{r.dispatch_mb:,.1f}",
            f"{r.dispatch_cpu_ms_per_mb:.2f}",
            _show(r.peer_dispatch_mb),
            _show(r.peer_dispatch_cpu_ms_per_mb),
        )
        for r in reports
    ]
    return markdown_rows(COLUMNS, rows, 0)


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.controller", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[512])
    parser.add_argument("--trajectories", type=int, nargs="+", default=[16384], help="one number for each of --ranks")
    parser.add_argument("--replicas", type=int, help="data-parallel replicas; default: one for each 8 ranks")
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[2000], help="longest response")
    parser.add_argument("--steps", type=int, default=6, help="the first one is not measured")
    parser.add_argument("--slow-rank-seconds", type=float, default=0.0, help="how long one rank trains in each step")
    parser.add_argument("--prompts", type=int, default=40_000, help="prompts whose memory is measured")
    parser.add_argument("--store-gb", type=int, default=8, help="size of Ray's object store in GiB")
    parser.add_argument("--peer", choices=["verl"], help="also measure verl's dispatch of as many bytes")
    default = Path("runs/verl-environment")
    parser.add_argument("--environment", type=Path, default=default, metavar="DIR", help="Python environment of verl")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
