"""`megarl data`: what a data file holds, and what training uses of it.

All rows are read; lengths in tokens are those of a sample of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.cli.options import add_overrides, console, file_path, home_path
from megarl.config import STAGES, load_config
from megarl.config.load import make_config
from megarl.config.run import StageConfig
from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from megarl.controller.preflight.data_report import FileReport
    from megarl.data.account import Segment

TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files of a model on the hub that are downloaded: all but weights."""

OPEN, CLOSE = "⟦", "⟧"
"""Marks around tokens that are trained on, where the output has no colours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `FILE | --config CONFIG`, `--model`, `--stage`, `--eval`, `--rows`, `--json` and `--set`."""
    parser.description = (
        "Print what a data file holds: its format and why it was recognised, what each column is used for, rows that "
        "equal others or are held out, rows that are left out, and some rendered rows with the tokens that are trained "
        "on. All rows are read; lengths in tokens are those of a sample."
    )
    parser.add_argument("file", nargs="?", type=home_path, metavar="FILE", help="file, folder, pattern or hf:// path")
    parser.add_argument("--config", type=file_path, metavar="CONFIG", help="the files of this configuration, for FILE")
    parser.add_argument("--stage", choices=tuple(STAGES), default="train", help="command that the file is for (train)")
    parser.add_argument(
        "--model", type=home_path, metavar="HF_DIR", help="model folder or hub id, for its tokenizer and chat template"
    )
    parser.add_argument("--eval", type=home_path, metavar="FILE", help="held-out rows, to find those in both files")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="number of rows to show (2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Print the account of each file.

    Raises:
        MegarlError: the options, the configuration or the model are invalid, a file cannot be read, or no row has a
            field that the configuration names; the accounts are printed in this case too.
    """
    if args.rows < 0:
        raise ConfigError(f"--rows needs at least 0, got {args.rows}")
    config = _with_local_tokenizer(_make_config(args))
    from megarl.controller.preflight.data_report import report_files
    from megarl.data.data_files import with_local_data

    reports = report_files(with_local_data(config), num_shown=args.rows)
    if args.json:
        for report in reports:
            print(json.dumps(report.as_json()), flush=True)
    else:
        _print_reports(reports)
    if problems := [problem for report in reports for problem in report.problems()]:
        raise DataError("\n".join(problems))
    return 0


def _print_reports(reports: Sequence[FileReport]) -> None:
    out = console()
    for number, report in enumerate(reports):
        if number:
            out.print()
        _print_report(out, report)


def _make_config(args: argparse.Namespace) -> StageConfig:
    """Return the configuration of the files; one for `FILE` has the defaults of its command.

    Raises:
        ConfigError: FILE and --config are both missing or both given, or the configuration is invalid.
    """
    if (args.file is None) == (args.config is None):
        raise ConfigError(f"needs either FILE or --config, got {'neither' if args.file is None else 'both'}")
    kind = STAGES[args.stage]
    if args.config is not None:
        own = {"data.eval_path": args.eval, "model.path": args.model}
        given = [f"{key}={json.dumps(value)}" for key, value in own.items() if value is not None]
        return load_config(kind, args.config, [*args.overrides, *given])
    from megarl.controller.preflight.data_report import NO_MODEL

    tree: dict[str, object] = {
        "run_dir": "runs/data",  # needed by every configuration; nothing is written
        "model": {"path": args.model or NO_MODEL},
        "data": {"path": args.file, "eval_path": args.eval},
    }
    return make_config(kind, tree, args.overrides)


def _with_local_tokenizer(config: StageConfig) -> StageConfig:
    """Return the configuration with a local folder of the model, without its weights if it is on the hub.

    Raises:
        ConfigError: the model cannot be downloaded.
    """
    from megarl.model_files.hub import download_model, is_hub_id

    path = config.model.path
    if config.model.tiny is not None or not is_hub_id(path):
        return config
    try:
        folder = download_model(path, commit=config.model.hub_revisions.get(path), files=TOKENIZER_FILES)
    except ConfigError as e:
        raise ConfigError(f"model.path: {e}") from e
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _print_report(out: Console, report: FileReport) -> None:
    """Print a file's table of columns, a line for each fact and notice, and the rendered rows."""
    from rich.table import Table
    from rich.text import Text

    account = report.account
    out.print(
        Text(f"{report.path}: {account.num_rows:,} rows, {report.format}, because {report.reason}"), soft_wrap=True
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("column", "type", "rows", "use"):
        table.add_column(heading, justify="right" if heading == "rows" else "left")
    for name, use in report.uses.items():
        table.add_row(Text(name), report.types(name), f"{account.columns[name].total():,}", use)
    out.print(table)
    for line in report.facts():
        out.print(Text(line), soft_wrap=True)
    for line in report.notices():
        out.print(Text(f"notice: {line}", style="yellow"), soft_wrap=True)
    for place, texts in report.shown.items():
        for name, segments in texts.items():
            out.print(Text(f"--- {name} of {place}", style="bold"), soft_wrap=True)
            out.print(mark_trained(segments, is_coloured=out.is_terminal), soft_wrap=True)


def mark_trained(segments: Sequence[Segment], *, is_coloured: bool) -> Text:
    """Return the text of a row with the parts that are trained on in green, or between marks."""
    from rich.text import Text

    text = Text()
    for segment in segments:
        shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in segment.text)
        if segment.is_trained:
            text.append(shown if is_coloured else f"{OPEN}{shown}{CLOSE}", style="green")
        else:
            text.append(shown)
    return text
