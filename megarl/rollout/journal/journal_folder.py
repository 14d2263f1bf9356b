"""The folder of a run's rollout journal, as a whole: its steps, and what is removed from it when."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from megarl.rollout.journal.record_file import scan

SUFFIX = ".groups"


def journal_folder(run_dir: str | Path) -> Path:
    """Where the journal of a run is."""
    return Path(run_dir) / "journal"


def step_folder(folder: Path, step: int) -> Path:
    """Where the journal in `folder` has a step."""
    return folder / f"step-{step:06d}"


def steps_in(run_dir: str | Path) -> list[int]:
    """The steps that the journal has groups of, in order; what people have put beside them is none."""
    names = (path.name.removeprefix("step-") for path in journal_folder(run_dir).glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def drop_steps(run_dir: str | Path, *, upto: int) -> None:
    """Remove what is written down of the steps up to `upto`, which no checkpoint needs any more.

    On a network's disk files that a worker has open yet cannot be: they go the next time.
    """
    for step in [each for each in steps_in(run_dir) if each <= upto]:
        shutil.rmtree(step_folder(journal_folder(run_dir), step), ignore_errors=True)


def discard_after(run_dir: str | Path, step: int) -> None:
    """Remove what is written down of later steps; no worker may be at work on them."""
    for late in [each for each in steps_in(run_dir) if each > step]:
        shutil.rmtree(step_folder(journal_folder(run_dir), late))


def fingerprints_in(run_dir: str | Path) -> set[str]:
    """Of the runs that the journal's files belong to; an empty journal belongs to none."""
    found: set[str] = set()
    for path in journal_folder(run_dir).glob(f"step-*/*{SUFFIX}"):
        frames, _ = scan(path)
        found.update(f.meta["fingerprint"] for f in frames[:1] if "fingerprint" in f.meta)
    return found


def set_aside(run_dir: str | Path) -> Path:
    """Rename the journal, and say to what; the run begins an empty one."""
    folder = journal_folder(run_dir)
    names = (folder.with_name(f"{folder.name}-aside-{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))
