"""Measures `megarl data` and `megarl check` on a large JSONL file, and compares its prompts after a resume.

python -m benchmarks.data --rows 1000000 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.data.measure import (
    AccountReport,
    CheckReport,
    ResumeReport,
    compare_resumed,
    measure_account,
    measure_check,
)
from benchmarks.data.rows import NUM_HELD_OUT, write_files
from benchmarks.results_file import write_results
from benchmarks.text_table import markdown_rows, print_rows
from megarl.errors import ConfigError, MegarlError

COLUMNS = (
    "rows",
    "MB",
    "CPU s",
    "us / row",
    "peak MB",
    "bytes / row",
    "check CPU s",
    "check peak MB",
    "prompts",
    "stops",
    "same order",
)

INTRODUCTION = """\
# CPU and memory of checking a large file

Measured on a node with {cores} CPU cores:

```
{command}
```

`megarl data` reads a JSONL file of known content, and {held_out:,} held-out rows. What it counts in all rows (equal
rows, equal prompts, held-out prompts, answers) needs to be what the file has. Without a model it measures no lengths,
which come from a sample of fixed size.

- `CPU s`: user and system time of the process, imports included. `us / row`: that divided by the number of rows.
- `peak MB`: largest resident memory of the process. `bytes / row`: how much larger it is than that of the account of
  the held-out file alone, by row.
- `check CPU s`, `check peak MB`: the same of `megarl check` on a run with a tiny model and the reward `numeric`. It
  makes the same account, tokenizes every prompt, compares it with the limit, and reads every reference answer.
- `prompts`: the order of prompts of 1.25 epochs, shuffled, in batches of 512, without a stop, and with `stops` stops:
  after each, the file is read again and the order restored from the state that a checkpoint has. `same order`: whether
  the sequences of rows, by the digests of their contents, are bitwise equal.

"""


def main() -> int:
    """Print one report per number of rows; return 1 if a resumed order differs."""
    args = _parser().parse_args()
    try:
        if min(args.rows) < 2:
            raise ConfigError(f"--rows needs at least 2, got {min(args.rows)}")
        reports = [_run(rows, args.folder, as_json=args.json) for rows in args.rows]
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    rows = [_cells(*report) for report in reports]
    if not args.json:
        print_rows(COLUMNS, rows, 0)
    if args.write:
        table = markdown_rows(COLUMNS, rows, 0)
        write_results(args.write, INTRODUCTION, table, module="benchmarks.data", held_out=NUM_HELD_OUT)
    return 0 if all(resumed.is_equal for *_, resumed in reports) else 1


def _run(num_rows: int, folder: Path | None, *, as_json: bool) -> tuple[AccountReport, CheckReport, ResumeReport]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        counts = write_files(Path(scratch), num_rows)
        account = measure_account(Path(scratch), counts)
        check = measure_check(Path(scratch), counts)
        resumed = compare_resumed(Path(scratch) / "train.jsonl")
    if as_json:
        print(json.dumps({**asdict(account), **asdict(check), **asdict(resumed)}), flush=True)
    return account, check, resumed


def _cells(account: AccountReport, check: CheckReport, resumed: ResumeReport) -> list[str]:
    return [
        f"{account.rows:,}",
        f"{account.mb:.1f}",
        f"{account.cpu_seconds:.1f}",
        f"{1e6 * account.cpu_seconds / account.rows:.1f}",
        f"{account.peak_mb:.0f}",
        f"{account.bytes_per_row:.0f}",
        f"{check.check_cpu_seconds:.1f}",
        f"{check.check_peak_mb:.0f}",
        f"{resumed.num_prompts:,}",
        str(resumed.num_stops),
        "yes" if resumed.is_equal else "no",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000], help="number of rows, of about 300 bytes")
    parser.add_argument("--folder", type=Path, help="folder for the files; default: that of temporary files")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
