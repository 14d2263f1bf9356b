"""Measures how long saving a training state holds up training, at once and in the background.

python -m benchmarks.checkpoint --json
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.checkpoint.measure import SaveReport, measure
from megarl.errors import MegarlError

MODELS = {
    "large": {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8},
    "demo": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2},
}
"""States of 790 MB and of 2 MB in float32."""


def main() -> int:
    """One report per model on stdout."""
    args = _parser().parse_args()
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
    return failed


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
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind, after a first one")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: where temporary files are")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
