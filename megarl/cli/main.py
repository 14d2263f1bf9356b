"""The `megarl` command.

A command is a file of this folder with `add_arguments(parser)` and `run(args)`; only the one that is asked for is
imported, so that `megarl --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from megarl import __version__
from megarl.cli.output import print_error
from megarl.errors import MegarlError, StoppedEarly
from megarl.process.early_stop_signal import signal_held

SUMMARIES = {
    "train": "reinforcement learning",
    "attach": "follow a run that was left to its Ray cluster",
    "sft": "supervised fine-tuning on demonstrations",
    "rm": "a reward or cost model from pairs of answers",
    "dpo": "direct preference optimisation on pairs of answers",
    "eval": "accuracy of a model on held-out prompts",
    "score": "log-probabilities and entropies of given tokens",
    "convert": "a model from Hugging Face's format to Megatron's, and back",
    "checkpoint": "list, verify or remove the checkpoints of a run",
    "check": "find what is wrong with a configuration, without starting anything",
    "doctor": "what this machine has, what will be used, what is missing",
    "launch": "a command over several machines: a Ray node on each, the command on the first",
    "reshard": "what moving weights from trainer to engines costs",
    "demo": "fine-tune and reinforce a tiny model on this machine",
}

INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


class Command(Protocol):
    """What a command's file provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """The exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a MegarlError becomes one message on stderr and its own code."""
    with signal_held():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    name = next((word for word in argv if not word.startswith("-")), None)
    command = _load(name) if name in SUMMARIES else None
    parser = _parser(name, command)
    args = parser.parse_args(argv)
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return command.run(args)
    except MegarlError as error:
        # Ray raises a worker's error as a subclass whose text is the remote traceback; `cause` is what was raised.
        cause = getattr(error, "cause", error)
        error = cause if isinstance(cause, MegarlError) else error
        if isinstance(error, StoppedEarly):
            print(error, file=sys.stderr)
        else:
            print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED


def _parser(name: str | None, command: Command | None) -> argparse.ArgumentParser:
    """The parser with every command named, and the arguments of command `name`."""
    parser = argparse.ArgumentParser(prog="megarl", description="Reinforcement learning for language models.")
    parser.add_argument("-V", "--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for each, summary in SUMMARIES.items():
        subparser = commands.add_parser(each, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if each == name and command is not None:
            command.add_arguments(subparser)
    return parser


def _load(name: str) -> Command:
    match name:
        case "train":
            from megarl.cli import train

            return train
        case "attach":
            from megarl.cli import attach

            return attach
        case "sft":
            from megarl.cli import sft

            return sft
        case "rm":
            from megarl.cli import rm

            return rm
        case "dpo":
            from megarl.cli import dpo

            return dpo
        case "eval":
            from megarl.cli import eval as evaluate

            return evaluate
        case "score":
            from megarl.cli import score

            return score
        case "convert":
            from megarl.cli import convert

            return convert
        case "checkpoint":
            from megarl.cli import checkpoint

            return checkpoint
        case "check":
            from megarl.cli import check

            return check
        case "doctor":
            from megarl.cli import doctor

            return doctor
        case "launch":
            from megarl.cli import launch

            return launch
        case "reshard":
            from megarl.cli import reshard

            return reshard
        case "demo":
            from megarl.cli import demo

            return demo
    raise AssertionError(name)
