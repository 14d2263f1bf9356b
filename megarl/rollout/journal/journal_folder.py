"""The folder of a run's rollout journal: its format, its steps, and how they are listed and removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.errors import DataError
from megarl.model_files.json_object import JsonMapping
from megarl.rollout.journal.record_file import read_records

FORMAT = 5
"""Version of the journal's files, written into the first record of each; format 1 did not write it."""

SUFFIX = ".groups"


def journal_folder(run_dir: str | Path) -> Path:
    """Return the journal folder of a run."""
    return Path(run_dir) / "journal"


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of one step in the journal folder `folder`."""
    return folder / f"step-{step:06d}"


def list_steps(run_dir: str | Path) -> list[int]:
    """Return the steps that have a folder in the journal, sorted; ignores entries with other names."""
    names = (path.name.removeprefix("step-") for path in journal_folder(run_dir).glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def remove_steps(run_dir: str | Path, *, up_to: int) -> None:
    """Remove the steps up to and including `up_to`, which no checkpoint needs any more.

    On a network file system, files that a worker still has open cannot be removed: the next call removes them.
    """
    for step in [each for each in list_steps(run_dir) if each <= up_to]:
        shutil.rmtree(step_folder(journal_folder(run_dir), step), ignore_errors=True)


def remove_steps_from(run_dir: str | Path, step: int) -> None:
    """Remove the groups of `step` and all later ones, which a resumed run then samples again."""
    for each in [each for each in list_steps(run_dir) if each >= step]:
        shutil.rmtree(step_folder(journal_folder(run_dir), each), ignore_errors=True)


def read_fingerprints(run_dir: str | Path) -> set[str]:
    """Return the fingerprints of the runs that wrote the journal's files; empty for an empty journal.

    Raises:
        DataError: the journal has another format.
    """
    found: set[str] = set()
    for path in journal_folder(run_dir).glob(f"step-*/*{SUFFIX}"):
        records, _ = read_records(path)
        for record in records:
            if "fingerprint" in record.meta:
                check_format(path, record.meta)
                found.add(record.meta["fingerprint"])
    return found


def check_format(path: Path, meta: JsonMapping) -> None:
    """Check that a journal file has this version's format; `meta`: the metadata of its first record.

    Raises:
        DataError: the file has another format; names the journal's folder.
    """
    got = meta.get("format", 1)
    if got != FORMAT:
        raise DataError(
            f"the rollout journal {path.parent.parent} has format {got}, but this version of megarl reads format "
            f"{FORMAT}: start a new run, or resume with the version that wrote the journal"
        )
