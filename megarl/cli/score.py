"""`megarl score`: log-probabilities and entropies of given tokens."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megarl.cli.options import add_overrides
from megarl.cli.output import console
from megarl.process.torchrun_env import TorchrunWorld, said_once, torchrun_world

if TYPE_CHECKING:
    from megarl.config import ScoreConfig
    from megarl.data.token_file import TokenCount
    from megarl.offline.token_scoring import Scored

SECONDS_PER_LINE = 10.0
"""Between two lines of progress where stderr is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    parser.description = (
        "Log-probability of every token after the first, given those before it, and entropy (nats) of the distribution "
        "that it was drawn from. Keys of an input line other than token_ids go to the output line, unless they are "
        "called logprobs or entropy; blank lines are skipped."
    )
    parser.add_argument("--model", required=True, metavar="HF_DIR", help="folder in Hugging Face format")
    parser.add_argument(
        "--input", required=True, type=Path, metavar="TOKENS", help='JSONL: {"token_ids": [...]} a line'
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="SCORES",
        help='JSONL: {"logprobs": [...], "entropy": [...]} a line',
    )
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Write the scores; stdout says where, stderr how far. Of torchrun's ranks, the first reads and writes.

    Raises:
        MegarlError: configuration, model, output and every line of the input are checked before Ray starts, and before
            a rank has the model.
    """
    from megarl.config import make_score_config

    world = torchrun_world()
    with said_once(world):
        config = make_score_config(args.model, args.overrides, slots=world.slots if world else None)
        if world is not None:
            world.require(config.sized_placement)
    if world is None:
        _score_on_ray(config, args)
    else:
        _score_on_ranks(config, args, world)
    if world is None or world.rank == 0:
        console().print(f"scores       {args.output}", highlight=False)
    return 0


def _score_on_ray(config: ScoreConfig, args: argparse.Namespace) -> None:
    from megarl.data.token_file import partial_file

    with partial_file(args.output, source=args.input) as out:
        from megarl.offline.token_scoring import (  # brings torch: a wrong key is told before
            open_tokens,
            score_file,
            scorers,
        )

        tokens = open_tokens(config, args.input)
        with ScoreProgress(tokens.check()) as progress, scorers(config) as processes:
            score_file(config, processes, tokens, out, progress.show)


def _score_on_ranks(config: ScoreConfig, args: argparse.Namespace, world: TorchrunWorld) -> None:
    from megarl.controller.torchrun_ranks import joined_ranks
    from megarl.data.token_file import partial_file
    from megarl.offline.token_scoring import open_tokens, score_file, score_with_first

    with joined_ranks(config.sized_placement, world) as ranks:
        if world.rank != 0:
            score_with_first(config, ranks)
            return
        with partial_file(args.output, source=args.input) as out:
            tokens = open_tokens(config, args.input)
            with ScoreProgress(tokens.check()) as progress:
                score_file(config, ranks, tokens, out, progress.show, share=ranks.from_first)


class ScoreProgress:
    """On stderr: a bar in a terminal, a line now and then elsewhere, and one at the end.

    with ScoreProgress(tokens.check()) as progress:
        progress.show(Scored(num_lines=512, num_tokens=65_536, seconds=2.0))
    """

    def __init__(self, count: TokenCount) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._count, self._shown_at = count, time.monotonic()
        self._scored: Scored | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("starting ranks", total=count.num_tokens)

    def show(self, scored: Scored) -> None:
        """Say how far scoring is."""
        self._scored = scored
        self._bar.update(self._task, completed=scored.num_tokens, description=self._text(scored))
        due = time.monotonic() - self._shown_at >= SECONDS_PER_LINE
        if self._bar.disable and due and scored.num_lines < self._count.num_lines:
            self._shown_at = time.monotonic()
            print(self._text(scored), file=sys.stderr, flush=True)

    def _text(self, scored: Scored) -> str:
        from megarl.tracking.progress import scaled

        rate = scaled(scored.num_tokens / scored.seconds)
        return f"scored {scored.num_lines:,}/{self._count.num_lines:,} lines  {rate}tok/s"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if error is None and self._scored is not None:
            print(f"{self._text(self._scored)}  {self._scored.seconds:.1f} s", file=sys.stderr)
