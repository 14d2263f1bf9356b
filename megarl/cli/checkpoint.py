"""`megarl checkpoint ls | verify | prune`: the checkpoints of a run."""

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

from megarl.cli.output import console, print_error
from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megarl.checkpoint.store import CheckpointStore, Saved
    from megarl.checkpoint.verify import Advance
    from megarl.config.checkpoint import CheckpointConfig

ACTIONS = {
    "ls": "what there is, what of it is whole as far as sizes tell, and what keeps it",
    "verify": "read every file and compare it with the manifest; exit code 1 where one differs",
    "prune": "remove the checkpoints that nothing keeps; the newest that is whole, which is read to be sure, stays",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A checkpoint, as `ls` shows it."""

    step: int
    created: str | None
    """UTC, as ISO 8601. None, as the layout, where the manifest cannot be read."""
    bytes: int
    """Of the files that are there."""
    layout: Mapping[str, Any] | None
    whole: bool
    problems: tuple[str, ...]
    kept_by: str | None
    """None: `prune` would remove it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    parsers = {}
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        action.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
        parsers[name] = action
    parsers["ls"].add_argument("--json", action="store_true", help="one object a line")
    parsers["verify"].add_argument("step", type=int, nargs="?", metavar="STEP", help="only the checkpoint of this step")
    prune = parsers["prune"]
    for option, what in (("last", "newest checkpoints to keep"), ("every", "keep those of every so many steps too")):
        help_text = f"{what}; default: checkpoint.keep_{option} of the run"
        prune.add_argument(f"--keep-{option}", type=int, metavar="N", help=help_text)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(args: argparse.Namespace) -> int:
    """Results on stdout, what is wrong with a checkpoint and progress on stderr.

    Raises:
        MegarlError: there is no such run or step, or the run is to be pruned and is in use.
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
    from megarl.checkpoint.run_lock import live_holder

    rows = list(_rows(store))
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return 0
    out = console()
    if rows:
        _show(rows)
    else:
        out.print(f"{store.folder} has no checkpoints", soft_wrap=True)
    for row in rows:
        for problem in row.problems:
            out.print(f"step {row.step}: {problem}", soft_wrap=True, markup=False)
    if holder := live_holder(run_dir):
        out.print(f"in use by pid {holder.pid} on host {holder.host} since {holder.since}", soft_wrap=True)
    return 0


def _rows(store: CheckpointStore) -> Iterator[Row]:
    from megarl.checkpoint.manifest import NewerFormatError, read_manifest
    from megarl.checkpoint.verify import damage

    options = _options(store)
    kept = store.retention(keep_last=options.keep_last, keep_every=options.keep_every)
    for saved, kept_by in kept.items():
        try:
            manifest = read_manifest(saved.folder)
            problems = damage(saved.folder)
        except NewerFormatError as e:
            manifest, problems = None, [str(e)]
        except DataError:
            manifest, problems = None, damage(saved.folder)
        if not saved.folder.exists():
            continue  # the run has removed it meanwhile
        yield Row(
            step=saved.step,
            created=manifest.created if manifest else None,
            bytes=_size(saved.folder),
            layout=manifest.layout if manifest else None,
            whole=not problems,
            problems=tuple(problems),
            kept_by=kept_by,
        )


def _show(rows: Sequence[Row]) -> None:
    from rich.table import Table

    from megarl.tracking.progress import scaled

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "when", "size", "layout", "whole", "kept by"):
        table.add_column(heading, justify="right" if heading in ("step", "size") else "left")
    for row in rows:
        created = "-" if row.created is None else row.created.replace("T", " ").replace("+00:00", " UTC")
        whole = "yes" if row.whole else "no"
        table.add_row(
            str(row.step), created, f"{scaled(row.bytes)}B", _layout(row.layout), whole, row.kept_by or "nothing"
        )
    console().print(table)


def _layout(layout: Mapping[str, Any] | None) -> str:
    """Of each model the sizes that split it, and the ranks: `policy tp=2 world=4`."""
    if layout is None:
        return "-"
    models = []
    for name, sizes in layout.items():
        split = {key: size for key, size in sizes.items() if not isinstance(size, bool) and size != 1}
        split["world"] = sizes["world"]
        models.append(" ".join([name, *(f"{key}={size}" for key, size in split.items())]))
    return ", ".join(models)


def _verify(store: CheckpointStore, step: int | None) -> int:
    from megarl.checkpoint.manifest import NewerFormatError
    from megarl.checkpoint.verify import files_below
    from megarl.tracking.progress import scaled

    chosen = [saved for saved in store.saved() if step in (None, saved.step)]
    if not chosen:
        there = ", ".join(str(saved.step) for saved in store.saved())
        needed = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise DataError(f"{store.folder} needs {needed}, " + (f"got those of steps {there}" if there else "has none"))
    is_whole = True
    for saved in chosen:
        start, size = time.perf_counter(), _size(saved.folder)
        is_newer = False
        try:
            with _hashing(saved.name, size) as advance:
                problems = store.verify(saved.folder, advance=advance)
        except NewerFormatError as e:
            problems, is_newer = [str(e)], True
        if not saved.folder.exists():
            print(f"{saved.name}  removed meanwhile", flush=True)
            continue
        seconds, num_files = time.perf_counter() - start, len(files_below(saved.folder))
        result = "newer" if is_newer else "damaged" if problems else "whole"
        print(f"{saved.name}  {result:<7}  {num_files} files  {scaled(size)}B  {seconds:.1f} s", flush=True)
        for problem in problems:
            print_error(f"{saved.name}: {problem}")
            is_whole = False
    return 0 if is_whole else 1


@contextmanager
def _hashing(name: str, num_bytes: int) -> Iterator[Advance]:
    """On a terminal a bar of the bytes that are read; elsewhere a line now and then."""
    from megarl.checkpoint.verify import telling

    if not sys.stderr.isatty():
        print(f"reading {name}", file=sys.stderr, flush=True)
        yield telling(name, lambda text: print(text, file=sys.stderr, flush=True))
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {name}", total=num_bytes)
        yield lambda read: bar.advance(task, read)


def _prune(store: CheckpointStore, args: argparse.Namespace) -> int:
    from megarl.checkpoint.run_lock import RunLock

    options = _options(store)
    keep_last = options.keep_last if args.keep_last is None else args.keep_last
    keep_every = options.keep_every if args.keep_every is None else args.keep_every
    if keep_last < 1:
        raise ConfigError(f"--keep-last needs to be at least 1, got {keep_last}")
    if keep_every < 0:
        raise ConfigError(f"--keep-every needs to be at least 0, got {keep_every}")
    with nullcontext() if args.dry_run else RunLock(args.run_dir):
        for name in () if args.dry_run else store.clean():
            print(f"removed  {name}, which was not finished")
        plan, newest = store.retention(keep_last=keep_last, keep_every=keep_every), None
        if None in plan.values():
            newest = _newest_whole(store, deep=options.verify == "checksums")
            plan = store.retention(keep_last=keep_last, keep_every=keep_every, newest=newest)
        _tell(plan, "would remove" if args.dry_run else "removing")
        if not args.dry_run:
            store.prune(keep_last=keep_last, keep_every=keep_every, newest=newest)
    return 0


def _newest_whole(store: CheckpointStore, *, deep: bool) -> int:
    """The step of the newest that is whole; 0: none is. What is wrong with later ones is told.

    Args:
        deep: every byte is compared; else sizes are.
    """
    from megarl.checkpoint.manifest import NewerFormatError
    from megarl.checkpoint.store import shortened
    from megarl.checkpoint.verify import damage

    for saved in reversed(store.saved()):
        try:
            with _hashing(saved.name, _size(saved.folder)) if deep else nullcontext() as advance:
                found = damage(saved.folder, deep=deep, advance=advance)
        except NewerFormatError as e:
            found = [str(e)]
        if not found:
            return saved.step
        print_error(f"{saved.name}: {shortened(found)}")
    return 0


def _tell(plan: Mapping[Saved, str | None], verb: str) -> None:
    """A line for each checkpoint."""
    from megarl.tracking.progress import scaled

    for saved, kept_by in plan.items():
        what = verb if kept_by is None else "keeping"
        why = "" if kept_by is None else f"  ({kept_by})"
        print(f"{what:<12}  {saved.name}  {scaled(_size(saved.folder))}B{why}", flush=True)


def _options(store: CheckpointStore) -> CheckpointConfig:
    """What the run says of its checkpoints, in the configuration that the newest was saved with.

    Nothing else of it is read, and no key that is unknown: another version may have written it.

    Raises:
        DataError: it has no such section.
    """
    import yaml

    from megarl.checkpoint.manifest import NewerFormatError
    from megarl.checkpoint.verify import damage
    from megarl.config.checkpoint import CheckpointConfig

    for saved in reversed(store.saved()):
        file = saved.folder / "config.yaml"
        try:
            if damage(saved.folder) or not file.exists():
                continue
            section = yaml.safe_load(file.read_text(encoding="utf-8"))["checkpoint"]
            known = {key: value for key, value in section.items() if key in CheckpointConfig.model_fields}
            return CheckpointConfig.model_validate(known)
        except NewerFormatError:
            continue
        except OSError as e:
            print_error(f"{file} cannot be read: {e.strerror}")
        except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as e:
            raise DataError(f"{file} needs a section `checkpoint` that this megarl can read: {e}") from e
    return CheckpointConfig()


def _size(folder: Path) -> int:
    """Bytes of the files that are there."""
    from megarl.checkpoint.verify import files_below

    num_bytes = 0
    for path in files_below(folder).values():
        with suppress(FileNotFoundError):  # the run may remove a checkpoint meanwhile
            num_bytes += path.stat().st_size
    return num_bytes
