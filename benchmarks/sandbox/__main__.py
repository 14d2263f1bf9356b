"""`python -m benchmarks.sandbox`: print times as JSON; exit code 1 if they miss the targets or something is left."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.results_file import write_results
from benchmarks.sandbox.measure import measure
from benchmarks.text_table import markdown_rows
from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers

MAX_P50_MS, MAX_P95_MS = 60.0, 200.0
WITHOUT_TARGET = {"runsc": 10}
"""Tiers that are measured only, and the share of the runs that they get."""

INTRODUCTION = """# Programs in sandboxes

`{command}` on {cores} cores: a program of three lines, each time in a new sandbox, from its start until nothing
of it is left. CPU time is that of all of its processes. Targets: at most {p50:.0f} ms for half of the programs,
{p95:.0f} ms for 95 of 100; runsc, which starts a kernel for each sandbox, has none.

"""


def main() -> int:
    """Measure each kind of sandbox that this machine has."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a table in Markdown")
    args = parser.parse_args()
    found = find_local_tiers()
    results = [
        measure(tier, max(1, args.runs // WITHOUT_TARGET.get(tier, 1))) for tier in LOCAL_TIERS if found[tier] is None
    ]
    missed = [
        result.tier
        for result in results
        if (result.tier not in WITHOUT_TARGET and (result.wall_p50_ms > MAX_P50_MS or result.wall_p95_ms > MAX_P95_MS))
        or result.processes_left + result.mounts_left + result.files_left
    ]
    lacking = {tier: reason for tier, reason in found.items() if reason is not None}
    print(json.dumps({"results": [asdict(result) for result in results], "lacking": lacking, "missed": missed}))
    if args.write is not None:
        rows = [[str(value) for value in asdict(result).values()] for result in results]
        columns = [name.replace("_", " ") for name in asdict(results[0])] if results else ["tier"]
        table = markdown_rows(columns, rows, num_text_columns=1)
        write_results(args.write, INTRODUCTION, table, module="benchmarks.sandbox", p50=MAX_P50_MS, p95=MAX_P95_MS)
    return 1 if missed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
