"""`megarl score`: compute log-probabilities and entropies of given tokens."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megarl.cli.options import add_family, add_overrides, console, file_path
from megarl.cluster.process.launcher_env import TorchrunWorld, report_on_rank0, torchrun_world

if TYPE_CHECKING:
    from megarl.cli.tools.token_scoring import ScoreProgress
    from megarl.config import ScoreConfig
    from megarl.data.token_file import TokenCount

PROGRESS_INTERVAL_SECONDS = 10.0
"""Seconds between two progress lines where stderr is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--model`, `--input`, `--output`, `--family` and `--set`."""
    parser.description = (
        "Compute the log-probability of every token after the first, given the tokens before it, and the entropy in "
        "nats of the distribution at its position. Other keys of an input line are copied to the output line, except "
        "logprobs and entropy. Blank lines are skipped."
    )
    parser.add_argument(
        "--model", required=True, metavar="HF_DIR", help="model folder in Hugging Face format or hub id"
    )
    parser.add_argument(
        "--input", required=True, type=file_path, metavar="TOKENS", help='JSONL file with {"token_ids": [...]} per line'
    )
    parser.add_argument(
        "--output",
        required=True,
        type=file_path,
        metavar="SCORES",
        help='JSONL file to write, {"logprobs": [...], "entropy": [...]} per line',
    )
    add_family(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Write the scores; print their path to stdout and progress to stderr. Under torchrun, rank 0 reads and writes.

    Raises:
        MegarlError: the configuration, model, output or a line of the input is invalid. All are checked before Ray
            starts or a rank loads the model.
    """
    from megarl.config import make_score_config

    world = torchrun_world()
    with report_on_rank0(world):
        slots = world.slots if world else None
        config = make_score_config(args.model, args.overrides, family=args.family, slots=slots)
        if world is not None:
            world.check_placement(config.sized_placement)
    if world is None:
        _score_on_ray(config, args)
    else:
        _score_on_ranks(config, args, world)
    if world is None or world.rank == 0:
        console().print(f"scores       {args.output}", highlight=False)
    return 0


def _score_on_ray(config: ScoreConfig, args: argparse.Namespace) -> None:
    from megarl.data.token_file import partial_file
    from megarl.model_files.hub import with_local_models

    config = with_local_models(config, notify=_print_notice)
    with partial_file(args.output, source=args.input) as out:
        from megarl.cli.tools.token_scoring import (  # imports torch: after the configuration is checked
            open_tokens,
            score_file,
            scorer_processes,
        )

        tokens = open_tokens(config, args.input, _print_notice)
        with ScoreProgressBar(tokens.check()) as progress, scorer_processes(config) as processes:
            score_file(config, processes, tokens, out, progress.show)


def _score_on_ranks(config: ScoreConfig, args: argparse.Namespace, world: TorchrunWorld) -> None:
    from megarl.cli.tools.token_scoring import open_tokens, score_file, score_with_first
    from megarl.controller.spmd_stage import join_ranks
    from megarl.data.token_file import partial_file
    from megarl.model_files.hub import with_local_models

    with join_ranks(config.sized_placement, world) as ranks:
        config = ranks.run_on_rank0(partial(with_local_models, config, notify=_print_notice))
        if world.rank != 0:
            score_with_first(config, ranks)
            return
        with partial_file(args.output, source=args.input) as out:
            tokens = open_tokens(config, args.input, _print_notice)
            with ScoreProgressBar(tokens.check()) as progress:
                score_file(config, ranks, tokens, out, progress.show, broadcast=ranks.broadcast_from_rank0)


def _print_notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ScoreProgressBar:
    """Shows progress on stderr: a bar on a terminal, else a line every 10 s; and a line at the end.

    with ScoreProgressBar(tokens.check()) as bar:
        bar.show(ScoreProgress(num_lines=512, num_tokens=65_536, seconds=2.0))
    """

    def __init__(self, count: TokenCount) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._count, self._printed_at = count, time.monotonic()
        self._scored: ScoreProgress | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("starting ranks", total=count.num_tokens)

    def show(self, scored: ScoreProgress) -> None:
        """Show the progress of scoring."""
        self._scored = scored
        self._bar.update(self._task, completed=scored.num_tokens, description=self._format(scored))
        due = time.monotonic() - self._printed_at >= PROGRESS_INTERVAL_SECONDS
        if self._bar.disable and due and scored.num_lines < self._count.num_lines:
            self._printed_at = time.monotonic()
            print(self._format(scored), file=sys.stderr, flush=True)

    def _format(self, scored: ScoreProgress) -> str:
        from megarl.tracking.progress import format_si

        rate = format_si(scored.num_tokens / scored.seconds)
        return f"scored {scored.num_lines:,}/{self._count.num_lines:,} lines  {rate}tok/s"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if error is None and self._scored is not None:
            print(f"{self._format(self._scored)}  {self._scored.seconds:.1f} s", file=sys.stderr)
