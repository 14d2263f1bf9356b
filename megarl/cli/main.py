"""The `megarl` command.

Each command is the module of its name, or an object in `train`, that satisfies `Command`. Only the module
of the requested command is imported: `megarl --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from megarl import __version__
from megarl.cli.options import print_error
from megarl.cluster.process.launcher_env import stop_signal_blocked
from megarl.errors import EarlyStop, MegarlError

SUMMARIES = {
    "train": "train a policy by reinforcement learning",
    "attach": "follow a run that was started with `megarl train --detach`",
    "sft": "fine-tune a model on demonstrations",
    "rm": "train a reward or cost model on preference pairs",
    "dpo": "train a policy by direct preference optimization",
    "eval": "evaluate a model on held-out prompts",
    "score": "compute log-probabilities and entropies of given tokens",
    "replay": "train again on the rollouts of a run's journal, and compare the checkpoints",
    "convert": "convert a model between Hugging Face and Megatron formats",
    "checkpoint": "list, verify or remove the checkpoints of a run",
    "check": "check a configuration without starting a process",
    "data": "show what a data file holds, and what training uses of it",
    "import": "convert the run script or configuration of another trainer; executes nothing",
    "schema": "print the JSON Schema of a command's configuration, for editors",
    "doctor": "check the hardware and packages of this machine or of a cluster",
    "launch": "run a command on several nodes: a Ray node on each, the command on the first",
    "reshard": "estimate the cost of weight sync from trainer to engines",
    "demo": "fine-tune a tiny model on this machine, then train it by reinforcement learning",
}

IN_TRAIN = ("sft", "rm", "dpo", "eval", "attach", "replay")
"""Commands that are objects in the module `train`; every other command is the module of its name."""

MODULES = {"import": "tools.import_run", "data": "tools.data_account"}
"""Command -> module in `megarl.cli`, where it is not of the same name."""

INTERRUPTED = 130
"""Exit code after SIGINT: 128 + 2, as in shells."""


class Command(Protocol):
    """What `main` needs of a command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return its exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A MegarlError is printed to stderr and returns its `exit_code`."""
    with stop_signal_blocked():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    name = next((word for word in argv if not word.startswith("-")), None)
    command = import_command(name) if name in SUMMARIES else None
    parser = _parser(name, command)
    args = parser.parse_args(argv)
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return command.run(args)
    except MegarlError as error:
        # Ray raises a worker's error as a subclass whose text is the remote traceback; `cause` is the original error.
        cause = getattr(error, "cause", error)
        error = cause if isinstance(cause, MegarlError) else error
        if isinstance(error, EarlyStop):
            print(error, file=sys.stderr)
        else:
            print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED


def _parser(name: str | None, command: Command | None) -> argparse.ArgumentParser:
    """Make the parser: all commands by name, with the arguments of command `name` only."""
    parser = argparse.ArgumentParser(prog="megarl", description="Reinforcement learning for language models.")
    parser.add_argument("-V", "--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for each, summary in SUMMARIES.items():
        subparser = commands.add_parser(each, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if each == name and command is not None:
            command.add_arguments(subparser)
    return parser


def import_command(name: str) -> Command:
    """Import the module of one of the commands in `SUMMARIES`, and no other."""
    if name in IN_TRAIN:
        from megarl.cli import train

        return train.COMMANDS[name]
    return cast("Command", import_module(f"megarl.cli.{MODULES.get(name, name)}"))
