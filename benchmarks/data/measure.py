"""Measures `megarl data` on a file, and compares the rows that a resumed run takes with those of one without a stop."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from benchmarks.data.rows import Counts
from megarl.data.account import SAMPLE_ROWS, digest_fields
from megarl.data.rows import read_rows
from megarl.data.sampler import PromptOrder, PromptSampler, SamplerState
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.errors import DataError

BATCH_ROWS = 512
STOPS = (0.1, 0.5, 0.97)
"""Shares of the prompts of one epoch after which the run is stopped and resumed."""
EPOCHS = 1.25

TOKENIZER_ROWS = 1000
"""Rows of the file on which the tokenizer of the checked run is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountReport:
    """Cost of the account of one file, by its own process."""

    rows: int
    mb: float
    cpu_seconds: float
    """User and system time of the process with all its threads, imports included."""
    peak_mb: float
    """Largest resident memory of the process."""
    bytes_per_row: float
    """Growth of the peak over that of the account of the held-out file, by row."""


def measure_account(folder: Path, counts: Counts) -> AccountReport:
    """Run `megarl data` on the files of `write_files` and compare its counts with those.

    Raises:
        DataError: the command fails, or counts something else.
    """
    train, held_out = str(folder / "train.jsonl"), str(folder / "heldout.jsonl")
    _, _, small = _run("data", held_out, "--json")
    out, cpu_seconds, peak = _run("data", train, "--eval", held_out, "--json")
    reports = {report["key"]: report for report in map(json.loads, out.splitlines())}
    account, of_held_out = reports["data.path"], reports["data.eval_path"]
    found = {
        "num_rows": account["num_rows"],
        "repeated_prompts": account["repeated_prompts"]["count"],
        "repeated_rows": account["repeated_rows"]["count"],
        "blank_answers": account["num_rows"] - account["num_answers"],
        "shared_prompts": of_held_out["training_prompts"][train]["count"],
    }
    if found != {name: value for name, value in asdict(counts).items() if name in found}:
        raise DataError(f"{train}: megarl data counts {found}, the file has {counts}")
    return AccountReport(
        rows=counts.num_rows,
        mb=counts.bytes / 1e6,
        cpu_seconds=cpu_seconds,
        peak_mb=peak / 1e6,
        bytes_per_row=(peak - small) / counts.num_rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Cost of `megarl check` on one file, by its own process."""

    check_cpu_seconds: float
    check_peak_mb: float
    """Largest resident memory of the process."""


def measure_check(folder: Path, counts: Counts) -> CheckReport:
    """Run `megarl check` on the files of `write_files` with a tiny model, whose tokenizer tokenizes all rows.

    Raises:
        DataError: the command fails, or does not report all rows and the lengths of a sample.
    """
    train = folder / "train.jsonl"
    texts = [str(row.fields["prompt"]) for row in islice(read_rows(train), TOKENIZER_ROWS)]
    write_tiny_model(folder / "model", texts, seed=0, context_length=1024)
    tree = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {
            "path": str(train),
            "eval_path": str(folder / "heldout.jsonl"),
            "fields": {"answer": "level"},  # which all rows have
        },
        "rollout": {"max_new_tokens": 32},
    }
    (folder / "check.yaml").write_text(json.dumps(tree), encoding="utf-8")
    out, cpu_seconds, peak = _run("check", str(folder / "check.yaml"))
    expected = f"# data.path: {counts.num_rows:,} rows, ", f"# data.path: tokens of {SAMPLE_ROWS:,} of "
    if counts.num_rows > SAMPLE_ROWS and not all(line in out for line in expected):
        raise DataError(f"{train}: megarl check does not report {expected}")
    return CheckReport(check_cpu_seconds=cpu_seconds, check_peak_mb=peak / 1e6)


LAUNCHER = """
import os, sys
file, *command = sys.argv[1:]
_, status, usage = os.wait4(os.posix_spawn(command[0], command, os.environ), 0)
with open(file, "w") as out:
    print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, file=out)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A process of 10 MB that runs a command and writes its CPU seconds and its peak memory in bytes.

Linux counts the memory of the process that starts a command as the command's own.
"""


def _run(*words: str) -> tuple[str, float, int]:
    """Run a command; return what it prints, its CPU seconds and its peak memory in bytes."""
    with tempfile.NamedTemporaryFile("r") as usage:
        command = [sys.executable, "-m", "megarl", *words]
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, usage.name, *command]
        done = subprocess.run(launcher, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise DataError(f"megarl {' '.join(words)} ended with code {done.returncode}")
        cpu_seconds, peak = usage.read().split()
    return done.stdout.decode(), float(cpu_seconds), int(peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """Whether a run that is stopped and resumed takes the prompts of one that is not."""

    num_prompts: int
    num_stops: int
    is_equal: bool


def compare_resumed(file: Path) -> ResumeReport:
    """Take the prompts of `EPOCHS` epochs without a stop, and stopped after each of `STOPS`.

    Each part of the stopped run reads the file again and has a new sampler, which it restores from the state that the
    part before has saved.
    """
    contents = _read_digests(file)
    num_prompts = int(EPOCHS * len(contents))
    whole, _ = _take(contents, None, num_prompts)
    parts, state = array("Q"), None
    for stop in [*(int(share * num_prompts) for share in STOPS), num_prompts]:
        part, state = _take(_read_digests(file), state, stop - len(parts))
        parts.extend(part)
    return ResumeReport(num_prompts=num_prompts, num_stops=len(STOPS), is_equal=whole.tobytes() == parts.tobytes())


def _read_digests(file: Path) -> array[int]:
    return array("Q", (digest_fields(row.fields) for row in read_rows(file)))


def _take(contents: array[int], state: SamplerState | None, num: int) -> tuple[array[int], SamplerState]:
    """Return the digests of the next rows after `state`, in the order of a run, and the state after them."""
    sampler = PromptSampler(PromptOrder(len(contents), seed=17, shuffle=True))
    if state is not None:
        sampler.restore(state)
    taken = array("Q", (contents[row] for size in _batch_sizes(num) for row in sampler.take(size)))
    return taken, sampler.state()


def _batch_sizes(num: int) -> Iterator[int]:
    """Yield the sizes of batches of `num` prompts."""
    yield from (min(BATCH_ROWS, num - start) for start in range(0, num, BATCH_ROWS))
