"""Measures how long synchronous and asynchronous checkpoint saves stall training.

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
"""Models whose training states have 743 MB and 3 MB in float32."""

INTRODUCTION = """\
# How long saving a checkpoint stalls training

Measured with {ranks} ranks on the CPU, one PyTorch thread each, on a node with {cores} CPU cores:

```
OMP_NUM_THREADS=1 {command}
```

The state is weights and both Adam moments in float32; the optimizer state is sharded over the ranks. Times are those of
the slowest rank, the median of {repeats} saves after a first one of each kind.

- `synchronous`: training waits for the whole save, until the files are on disk (fsync) and hashed.
- `asynchronous`: training waits for the copy to host memory at the start, and for the ranks to agree at the end. The
  time that the writer thread takes from training on the same cores is not included.
- `first asynchronous`: the first such save, whose copy has to allocate its memory.
- `write`: duration of writing in the background. `verify`: one process compares every file with its checksum.
- `load`: all ranks load the state; `read` is what they read together, as the system counts. `other layout` loads the
  same files in that layout, and reads more than the state if it needs columns of tensors that are stored by rows.

"""


def main() -> int:
    """Print one report per model to stdout."""
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
                print(f"error: {error} ({free} bytes were free before)", file=sys.stderr)
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
    "model | state MB | synchronous ms | asynchronous ms | ratio | first asynchronous ms | write ms | verify ms "
    "| load ms | read / state | other layout | load ms | read / state"
)


def markdown(reports: Mapping[str, SaveReport]) -> str:
    """Return the table in Markdown, one row per model."""
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
        f"{name}: {r.bytes / 2**20:.0f} MiB on {r.ranks} ranks; a save stalls training for "
        f"{1e3 * r.synchronous_seconds:.1f} ms if synchronous, {1e3 * r.asynchronous_seconds:.1f} ms if asynchronous "
        f"({100 * r.ratio:.1f} %; the first {1e3 * r.first_seconds:.1f} ms); load {1e3 * r.load_seconds:.0f} ms"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9, help="number of saves of each kind, after a first one")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: that of temporary files")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
