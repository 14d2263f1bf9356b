"""`megarl convert hf-to-megatron | megatron-to-hf`: convert a model between the two formats."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType
from typing import Self

from megarl.cli.options import add_family, add_overrides, console, file_path

DIRECTIONS = {
    "hf-to-megatron": (
        "HF_DIR",
        "CKPT_DIR",
        "Write the weights of a Hugging Face folder as a distributed checkpoint of megatron-core (torch_dist), in the "
        "layout of Megatron-LM: latest_checkpointed_iteration.txt and release/. The folder's other files are copied to "
        "hf/, for the conversion back.",
    ),
    "megatron-to-hf": (
        "CKPT_DIR",
        "HF_DIR",
        "Write the weights of the distributed checkpoint that latest_checkpointed_iteration.txt names as a Hugging "
        "Face folder, along with the files of CKPT_DIR/hf. The checkpoint's index is a pickle. If it contains anything "
        "but an index, reading it may execute code of its author, and is refused without --trust.",
    ),
}
"""Name -> (metavar of the input folder, metavar of the output folder, description)."""

LAYOUT = (
    "A checkpoint can be loaded in any parallel layout, not only in the one it was written in: "
    "--set trainer.parallel.tp=2 trainer.parallel.pp=2 only splits work and memory over more ranks."
)
"""Help text on parallel sizes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two directions with `--model`, `--output`, `--dtype` and `--set`."""
    directions = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION", title="directions")
    for name, (source, target, description) in DIRECTIONS.items():
        direction = directions.add_parser(
            name, help=f"from {source} to {target}", description=f"{description} {LAYOUT}"
        )
        what = "folder to read, or hub id" if name == "hf-to-megatron" else "folder to read"
        direction.add_argument("--model", required=True, type=file_path, metavar=source, help=what)
        direction.add_argument(
            "--output", required=True, type=file_path, metavar=target, help="folder to write: empty or not existing yet"
        )
        direction.add_argument(
            "--dtype",
            choices=("auto", "float32", "bfloat16"),
            default="auto",
            help="dtype of the weights written; auto, the default: bfloat16 if all weights are bfloat16 or "
            "quantized, else float32",
        )
        add_family(direction)
        add_overrides(direction)
        if name == "megatron-to-hf":
            direction.add_argument(
                "--trust", action="store_true", help="read the checkpoint even if its index may execute code"
            )


def run(args: argparse.Namespace) -> int:
    """Convert the model; print its folder to stdout and progress to stderr.

    Raises:
        MegarlError: the configuration, model or output folder is invalid; all are checked before anything starts.
    """
    from megarl.config import make_convert_config

    config = make_convert_config(args.overrides)
    from megarl.cli.tools.model_conversion import plan_export, plan_import  # after the checks: it imports Ray

    is_import = args.direction == "hf-to-megatron"
    if is_import:
        conversion = plan_import(config, args.model, args.output, args.dtype, family=args.family)
    else:
        conversion = plan_export(config, args.model, args.output, args.dtype, family=args.family, trust=args.trust)
    for notice in conversion.notices:
        print(f"--model: {notice}", file=sys.stderr)
    with ConvertProgress() as progress:
        seconds = conversion.run(progress.show)
    from megarl.tracking.progress import format_si

    print(f"converted {format_si(conversion.num_bytes)}B of {conversion.dtype} in {seconds:.1f} s", file=sys.stderr)
    console().print(f"{'checkpoint' if is_import else 'model':<12} {args.output}", highlight=False)
    return 0


class ConvertProgress:
    """Shows the current phase on stderr: a spinner on a terminal, else one line per phase.

    with ConvertProgress() as progress:
        progress.show("reading")
    """

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._status = self._console.status("")

    def show(self, what: str) -> None:
        """Show `what` as the current phase."""
        if self._console.is_terminal:
            self._status.update(what)
            self._status.start()
        else:
            print(what, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
