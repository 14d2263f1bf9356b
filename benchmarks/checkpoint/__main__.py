"""Measures how long saving a training state holds up training, at once and in the background.

python -m benchmarks.checkpoint --json
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.checkpoint.measure import SaveReport, measure
from benchmarks.results_file import write_results
from megarl.errors import MegarlError

MODELS = {
    "large": {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8},
    "demo": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2},
}
"""States of 743 MB and of 3 MB in float32."""

INTRODUCTION = """\
# How long a save holds up training

By {ranks} ranks on the CPU, one PyTorch thread each, on a machine with {cores} CPU cores:

```
OMP_NUM_THREADS=1 {command}
```

Weights and both of Adam's moments, in float32; the optimizer's state is divided between the ranks. Seconds are of the
slowest rank, the median of {repeats} saves after a first one of each kind.

- `at once`: training waits for all of the save, which ends with the files on the disk (fsync) and hashed.
- `in the background`: it waits for the copy on the host at the save's start, and for the ranks to agree at its end.
  What the thread that writes takes from training on the same cores is not in it.
- `first`: the same of the first such save, whose copy takes its memory from the system.
- `verified`: every file compared with its checksum, by one process. `read`: by all ranks together in a load, as the
  system counts; `other layout` loads the same files, and reads more than the state where it needs columns of what is
  stored row by row.

"""


def main() -> int:
    """One report per model on stdout."""
    args = _parser().parse_args()
    reports: dict[str, SaveReport] = {}
    failed = 0
    for name in args.models:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            folder = Path(scratch)
            config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, **MODELS[name]}
            config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
            config |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4}
            (folder / "config.json").write_text(json.dumps(config))
            free = shutil.disk_usage(folder).free
            try:
                report = measure(folder, ranks=args.ranks, sizes={"tp": args.tp}, folder=folder, repeats=args.repeats)
            except MegarlError as error:
                print(f"error: {error} ({free} bytes were free)", file=sys.stderr)
                failed = error.exit_code
                continue
        print(json.dumps({"model": name, **asdict(report)}) if args.json else _line(name, report), flush=True)
        reports[name] = report
    if args.write and not failed:
        write_results(
            args.write,
            INTRODUCTION,
            markdown(reports),
            module="benchmarks.checkpoint",
            ranks=args.ranks,
            repeats=args.repeats,
        )
    return failed


COLUMNS = (
    "model | state MB | at once ms | in the background ms | of it | first ms | written for ms | verified ms "
    "| loaded ms | read / state | other layout | loaded ms | read / state"
)


def markdown(reports: Mapping[str, SaveReport]) -> str:
    """A table, a model a row."""
    lines = [f"| {COLUMNS} |", "| --- |" + " ---: |" * COLUMNS.count("|")]
    for name, r in reports.items():
        cells = [
            name,
            f"{r.bytes / 1e6:.1f}",
            f"{1e3 * r.synchronous_seconds:.1f}",
            f"{1e3 * r.asynchronous_seconds:.1f}",
            f"{100 * r.ratio:.1f} %",
            f"{1e3 * r.first_seconds:.1f}",
            f"{1e3 * r.background_seconds:.0f}",
            f"{1e3 * r.verify_seconds:.0f}",
            f"{1e3 * r.load_seconds:.0f}",
            f"{r.read_bytes / r.bytes:.2f}",
            r.other_layout,
            f"{1e3 * r.other_load_seconds:.0f}",
            f"{r.other_read_bytes / r.bytes:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _line(name: str, r: SaveReport) -> str:
    return (
        f"{name}: {r.bytes / 2**20:.0f} MiB on {r.ranks} ranks; a save holds up training for "
        f"{1e3 * r.synchronous_seconds:.1f} ms at once, {1e3 * r.asynchronous_seconds:.1f} ms in the background "
        f"({100 * r.ratio:.1f} %; the first {1e3 * r.first_seconds:.1f} ms); loaded in {1e3 * r.load_seconds:.0f} ms"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9, help="saves of each kind, after a first one")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: where temporary files are")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
