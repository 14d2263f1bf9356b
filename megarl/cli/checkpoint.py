"""`megarl checkpoint ls | verify | prune`: list, verify or remove the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli.options import console, file_path, print_error
from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megarl.checkpoint.manifest import ReadCallback
    from megarl.checkpoint.store import CheckpointEntry, CheckpointStore
    from megarl.config.run import CheckpointConfig

ACTIONS = {
    "ls": "list checkpoints: whether file sizes match the manifest, and which retention rule keeps each",
    "verify": "compare the checksum of every file with the manifest; exit code 1 if any differs",
    "prune": "remove the checkpoints that no retention rule keeps; the latest valid one is verified first and stays",
}
"""Name -> help text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint as `ls` prints it; --json prints these fields."""

    step: int
    created: str | None
    """Time of creation in UTC, ISO 8601. None where the manifest cannot be read."""
    bytes: int
    """Bytes of the files in the folder."""
    layout: Mapping[str, Any] | None
    """Model name -> parallel sizes. None where the manifest cannot be read."""
    whole: bool
    """Whether all files exist with the size that the manifest states."""
    problems: tuple[str, ...]
    """One message for each reason why the checkpoint is not `whole`."""
    kept_by: str | None
    """Retention rule that keeps the checkpoint. None: `prune` would remove it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions, each with `RUN`, and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    parsers = {}
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        action.add_argument("run_dir", type=file_path, metavar="RUN", help="folder of the run (its run_dir)")
        parsers[name] = action
    parsers["ls"].add_argument("--json", action="store_true", help="print one JSON object per line")
    parsers["verify"].add_argument("step", type=int, nargs="?", metavar="STEP", help="verify only this step")
    prune = parsers["prune"]
    for option, what in (("last", "keep the N latest checkpoints"), ("every", "also keep those of every N-th step")):
        help_text = f"{what}; default: checkpoint.keep_{option} of the run"
        prune.add_argument(f"--keep-{option}", type=int, metavar="N", help=help_text)
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")


def run(args: argparse.Namespace) -> int:
    """Run the action: results go to stdout, problems and progress to stderr.

    Raises:
        MegarlError: the run or step does not exist, or `prune` finds the run in use.
    """
    from megarl.checkpoint.store import CheckpointStore

    if not args.run_dir.is_dir():
        raise DataError(f"there is no folder {args.run_dir}: RUN needs to be the run_dir of a run")
    store = CheckpointStore(args.run_dir)
    match args.action:
        case "ls":
            return _list(store, args.run_dir, as_json=args.json)
        case "verify":
            return _verify(store, args.step)
        case "prune":
            return _prune(store, args)
    raise AssertionError(args.action)


def _list(store: CheckpointStore, run_dir: Path, *, as_json: bool) -> int:
    from megarl.checkpoint.run_lock import find_live_holder

    rows = list(_rows(store))
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return 0
    out = console()
    if rows:
        _print_table(rows)
    else:
        out.print(f"{store.folder} has no checkpoints", soft_wrap=True)
    for row in rows:
        for problem in row.problems:
            out.print(f"step {row.step}: {problem}", soft_wrap=True, markup=False)
    if holder := find_live_holder(run_dir):
        out.print(f"in use by pid {holder.pid} on host {holder.host} since {holder.since}", soft_wrap=True)
    return 0


def _rows(store: CheckpointStore) -> Iterator[Row]:
    from megarl.checkpoint.manifest import UnsupportedFormatError, find_damage, read_manifest

    options = _retention_config(store)
    kept = store.retention(keep_last=options.keep_last, keep_every=options.keep_every)
    for saved, kept_by in kept.items():
        try:
            manifest = read_manifest(saved.folder)
            problems = find_damage(saved.folder)
        except UnsupportedFormatError as e:
            manifest, problems = None, [str(e)]
        except DataError:
            manifest, problems = None, find_damage(saved.folder)
        if not saved.folder.exists():
            continue  # the run has removed it in the meantime
        yield Row(
            step=saved.step,
            created=manifest.created if manifest else None,
            bytes=_folder_bytes(saved.folder),
            layout=manifest.layout if manifest else None,
            whole=not problems,
            problems=tuple(problems),
            kept_by=kept_by,
        )


def _print_table(rows: Sequence[Row]) -> None:
    from rich.table import Table

    from megarl.tracking.progress import format_si

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "created", "size", "layout", "valid", "kept by"):
        table.add_column(heading, justify="right" if heading in ("step", "size") else "left")
    for row in rows:
        created = "-" if row.created is None else row.created.replace("T", " ").replace("+00:00", " UTC")
        valid = "yes" if row.whole else "no"
        table.add_row(
            str(row.step),
            created,
            f"{format_si(row.bytes)}B",
            _format_layout(row.layout),
            valid,
            row.kept_by or "nothing",
        )
    console().print(table)


def _format_layout(layout: Mapping[str, Any] | None) -> str:
    """Format the parallel sizes above 1 and the world size of each model, such as `policy tp=2 world=4`."""
    if layout is None:
        return "-"
    models = []
    for name, sizes in layout.items():
        split = {key: size for key, size in sizes.items() if not isinstance(size, bool) and size != 1}
        split["world"] = sizes["world"]
        models.append(" ".join([name, *(f"{key}={size}" for key, size in split.items())]))
    return ", ".join(models)


def _verify(store: CheckpointStore, step: int | None) -> int:
    from megarl.checkpoint.manifest import UnsupportedFormatError, list_files
    from megarl.tracking.progress import format_si

    chosen = [saved for saved in store.entries() if step in (None, saved.step)]
    if not chosen:
        there = ", ".join(str(saved.step) for saved in store.entries())
        needed = "checkpoints" if step is None else f"checkpoint of step {step}"
        raise DataError(f"{store.folder} has no {needed}" + (f"; it has steps {there}" if there else ""))
    all_valid = True
    for saved in chosen:
        start, size = time.perf_counter(), _folder_bytes(saved.folder)
        format_age = ""
        try:
            with _show_read_progress(saved.name, size) as advance:
                problems = store.verify(saved.folder, advance=advance)
        except UnsupportedFormatError as e:
            problems, format_age = [str(e)], e.age
        if not saved.folder.exists():
            print(f"{saved.name}  removed while it was read", flush=True)
            continue
        seconds, num_files = time.perf_counter() - start, len(list_files(saved.folder))
        result = format_age or ("damaged" if problems else "valid")
        print(f"{saved.name}  {result:<7}  {num_files} files  {format_si(size)}B  {seconds:.1f} s", flush=True)
        for problem in problems:
            print_error(f"{saved.name}: {problem}")
            all_valid = False
    return 0 if all_valid else 1


@contextmanager
def _show_read_progress(name: str, num_bytes: int) -> Iterator[ReadCallback]:
    """Show how many bytes have been read: a progress bar on a terminal, else a line from time to time."""
    from megarl.checkpoint.manifest import make_progress_reporter

    if not sys.stderr.isatty():
        print(f"reading {name}", file=sys.stderr, flush=True)
        yield make_progress_reporter(name, lambda text: print(text, file=sys.stderr, flush=True))
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {name}", total=num_bytes)
        yield lambda read: bar.advance(task, read)


def _prune(store: CheckpointStore, args: argparse.Namespace) -> int:
    from megarl.checkpoint.run_lock import RunLock

    options = _retention_config(store)
    keep_last = options.keep_last if args.keep_last is None else args.keep_last
    keep_every = options.keep_every if args.keep_every is None else args.keep_every
    if keep_last < 1:
        raise ConfigError(f"--keep-last needs to be at least 1, got {keep_last}")
    if keep_every < 0:
        raise ConfigError(f"--keep-every needs to be at least 0, got {keep_every}")
    with nullcontext() if args.dry_run else RunLock(args.run_dir):
        for name in () if args.dry_run else store.remove_partial():
            print(f"removed  {name}, which is incomplete")
        plan, newest = store.retention(keep_last=keep_last, keep_every=keep_every), None
        if None in plan.values():
            newest = _find_latest_valid(store, deep=options.verify == "checksums")
            plan = store.retention(keep_last=keep_last, keep_every=keep_every, newest=newest)
        _print_plan(plan, "would remove" if args.dry_run else "removing")
        if not args.dry_run:
            store.prune(keep_last=keep_last, keep_every=keep_every, newest=newest)
    return 0


def _find_latest_valid(store: CheckpointStore, *, deep: bool) -> int:
    """Return the step of the latest valid checkpoint, or 0; print the problems of later ones to stderr.

    Args:
        deep: compare checksums; else file sizes only.
    """
    from megarl.checkpoint.manifest import UnsupportedFormatError, find_damage
    from megarl.checkpoint.store import summarize_problems

    for saved in reversed(store.entries()):
        try:
            with _show_read_progress(saved.name, _folder_bytes(saved.folder)) if deep else nullcontext() as advance:
                found = find_damage(saved.folder, deep=deep, advance=advance)
        except UnsupportedFormatError as e:
            found = [str(e)]
        if not found:
            return saved.step
        print_error(f"{saved.name}: {summarize_problems(found)}")
    return 0


def _print_plan(plan: Mapping[CheckpointEntry, str | None], verb: str) -> None:
    """Print one line per checkpoint: kept, with the rule, or `verb`."""
    from megarl.tracking.progress import format_si

    for saved, kept_by in plan.items():
        what = verb if kept_by is None else "keeping"
        why = "" if kept_by is None else f"  ({kept_by})"
        print(f"{what:<12}  {saved.name}  {format_si(_folder_bytes(saved.folder))}B{why}", flush=True)


def _retention_config(store: CheckpointStore) -> CheckpointConfig:
    """Return the section `checkpoint` of the configuration that the latest readable checkpoint was saved with.

    Other sections and unknown keys are ignored: another version of megarl may have written them.

    Raises:
        DataError: the configuration has no such section.
    """
    import yaml

    from megarl.checkpoint.manifest import UnsupportedFormatError, find_damage
    from megarl.config.run import CheckpointConfig

    for saved in reversed(store.entries()):
        file = saved.folder / "config.yaml"
        try:
            if find_damage(saved.folder) or not file.exists():
                continue
            section = yaml.safe_load(file.read_text(encoding="utf-8"))["checkpoint"]
            known = {key: value for key, value in section.items() if key in CheckpointConfig.model_fields}
            return CheckpointConfig.model_validate(known)
        except UnsupportedFormatError:
            continue
        except OSError as e:
            print_error(f"{file} cannot be read: {e.strerror}")
        except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as e:
            raise DataError(f"{file} needs a section `checkpoint` that this version of megarl can read: {e}") from e
    return CheckpointConfig()


def _folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of the files in `folder`."""
    from megarl.checkpoint.manifest import list_files

    num_bytes = 0
    for path in list_files(folder).values():
        with suppress(FileNotFoundError):  # the run may remove a checkpoint in the meantime
            num_bytes += path.stat().st_size
    return num_bytes
