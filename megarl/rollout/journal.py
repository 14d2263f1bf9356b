"""The rollout journal: finished groups are written to disk before they are used, so that none is generated twice.

    <run_dir>/journal/step-000012/<host>-<pid>-<random>.groups     one file per worker process and step

A file can be read even if its writer was killed while it wrote a record:

    record   HEADER | meta, JSON | body

The header holds the lengths of meta and body, so that a reader can skip bodies that it does not need.

If several entries belong to the same job, the first one counts, with the files in the order of their names. The entry
of a worker that was sent the job because another worker was lost comes first: the lost one may still be writing.

A group is an Arrow message, one row per trajectory. Nothing is lost except surrogates in messages and names, which
become U+FFFD.

Workers read and write the files on one thread, in order. What arrives while the thread is busy is looked up, or
appended, together: a thread that competes with the event loop for the interpreter takes milliseconds for each call,
most of which it waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import struct
import uuid
import zlib
from collections.abc import Buffer, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megarl.batch.trajectory import TermReport, Trajectory, split_episodes
from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.process.atomic_files import make_durable_folder, sync_path
from megarl.cluster.workers.dispatch import call_for_all
from megarl.config import RunConfig
from megarl.config.reward import SERVICE_SETTINGS
from megarl.errors import DataError, WorkerError
from megarl.model_files.json_object import JsonMapping
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize
from megarl.text import map_text, replace_surrogates

logger = logging.getLogger(__name__)

MAGIC = b"mgrj"
HEADER = struct.Struct("<4sIIIII")
"""Magic, length of meta, length of body, CRC-32 of meta, of body, and of the header before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The metadata of a complete record and the position of its body in the file."""

    meta: JsonMapping
    start: int
    """Offset of the body in the file, in bytes."""
    length: int
    """Length of the body in bytes."""
    crc: int
    """CRC-32 of the body."""


def encode_record(meta: JsonMapping, body: Buffer = b"") -> bytes:
    """Return the bytes of one record; `body` is any object that supports the buffer protocol."""
    meta_bytes = json.dumps(meta).encode()
    length = memoryview(body).nbytes
    head = HEADER.pack(MAGIC, len(meta_bytes), length, zlib.crc32(meta_bytes), zlib.crc32(body), 0)
    return b"".join([head[:-4], struct.pack("<I", zlib.crc32(head[:-4])), meta_bytes, body])


def read_records(path: Path, start: int = 0) -> tuple[list[Record], int]:
    """Read the complete records from byte `start` on.

    An incomplete record at the end of the file is left for a later call: its writer may still be writing it. Damage
    elsewhere is logged as a warning; a damaged header ends the reading of the file.

    Returns:
        The records, and the offset at which the next call continues.
    """
    records: list[Record] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while start + HEADER.size <= size:
            file.seek(start)
            head = file.read(HEADER.size)
            magic, meta_length, length, meta_crc, crc, head_crc = HEADER.unpack(head)
            if magic != MAGIC or head_crc != zlib.crc32(head[:-4]):
                logger.warning("%s is damaged at byte %d; the groups after it are not used", path, start)
                return records, size
            end = start + HEADER.size + meta_length + length
            if end > size:
                break
            meta = file.read(meta_length)
            if zlib.crc32(meta) == meta_crc:
                records.append(Record(meta=json.loads(meta), start=end - length, length=length, crc=crc))
            else:
                logger.warning("%s is damaged at byte %d; the group there is not used", path, start)
            start = end
    return records, start


def read_body(path: Path, where: Record) -> bytes | None:
    """Return the record's body, or None with a logged warning if the body is damaged."""
    with path.open("rb") as file:
        file.seek(where.start)
        body = file.read(where.length)
    if zlib.crc32(body) == where.crc:
        return body
    logger.warning("%s is damaged after byte %d; the group there is not used", path, where.start)
    return None


class RecordWriter:
    """Appends records to a new file that only this writer writes to; a written record is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_durable_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        sync_path(path.parent)

    def write(self, data: bytes) -> None:
        """Write all of `data` to the file, and fsync it."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; nothing may be written afterwards."""
        os.close(self._descriptor)


FORMAT = 6
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


SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("group_id", pa.int64()),
        ("token_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("logprobs", pa.large_list(pa.float32())),
        ("policy_versions", pa.large_list(pa.int32())),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("reward", pa.float64()),
        ("reward_errors", pa.map_(pa.string(), pa.string())),
        ("finish_reason", pa.string()),
        ("segment", pa.int32()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("routes", pa.large_binary()),
        ("route_type", pa.string()),
        ("route_shape", pa.list_(pa.int64())),
    ]
)
PER_TOKEN = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "policy_versions": np.int32}


def encode_group(trajectories: Sequence[Trajectory]) -> pa.Buffer:
    """Return the trajectories as an Arrow record batch of `SCHEMA`, serialized as an IPC message."""
    offsets = pa.array(np.cumsum([0, *(t.num_tokens for t in trajectories)]), pa.int64())
    columns: list[pa.Array] = []
    routes = [t.routes for t in trajectories]
    encoded: dict[str, list[Any]] = {
        "routes": [None if each is None else each.tobytes() for each in routes],
        "route_type": [None if each is None else each.dtype.str for each in routes],
        "route_shape": [None if each is None else each.shape for each in routes],
    }
    for column in SCHEMA:
        if column.name in encoded:
            columns.append(pa.array(encoded[column.name], column.type))
            continue
        values = [getattr(t, column.name) for t in trajectories]
        if column.name in PER_TOKEN:
            flat = pa.array(np.concatenate(values), column.type.value_type)
            columns.append(pa.LargeListArray.from_arrays(offsets, flat))
        elif pa.types.is_map(column.type):
            pairs = [list(mapping.items()) for mapping in values]
            columns.append(pa.array(map_text(pairs, replace_surrogates), column.type))
        elif pa.types.is_list(column.type):
            columns.append(pa.array(map(list, values), column.type))
        else:
            columns.append(pa.array(map_text(values, replace_surrogates), column.type))
    return pa.record_batch(columns, schema=SCHEMA).serialize()


def decode_group(body: bytes) -> list[Trajectory]:
    """Return the trajectories that `encode_group` has serialized, bit for bit."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
    columns: dict[str, Sequence[object]] = {
        name: _split(batch.column(name), PER_TOKEN[name])
        if name in PER_TOKEN
        else batch.column(name).to_pylist(maps_as_pydicts="strict")
        for name in SCHEMA.names
    }
    columns["turn_rewards"] = list(map(tuple, batch.column("turn_rewards").to_pylist()))
    forms = zip(*(columns.pop(name) for name in ("routes", "route_type", "route_shape")), strict=True)
    columns["routes"] = [
        None if form[0] is None else np.frombuffer(form[0], form[1]).reshape(form[2]) for form in forms
    ]
    return [Trajectory(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _split(column: pa.LargeListArray, dtype: type[np.generic]) -> list[NDArray[np.generic]]:
    flat = column.values.to_numpy(zero_copy_only=False).astype(dtype)  # a copy, so that it is aligned and writable
    return np.split(flat, column.offsets.to_numpy()[1:-1])


MAX_OPEN_STEPS = 2
"""Number of steps whose index a worker keeps by default: the current step, and the step of a late reply."""

_REQUEST = re.compile(r"(?:step|evaluate)-(\d+)-(?:.+-)?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A finished job: its summary and its trajectories."""

    request_id: str
    prompt_id: str
    summary: GroupSummary
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job and its group, which is not in the journal yet."""

    job: GroupJob
    summary: GroupSummary
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, slots=True)
class _EntryLocation:
    path: Path
    record: Record


@dataclass(slots=True)
class _StepIndex:
    """The entries of one step's folder that have been read so far."""

    read: dict[Path, int] = field(default_factory=dict)
    """Number of bytes of each file that have been read."""
    unowned: set[Path] = field(default_factory=set)
    """Files whose first record is damaged: no record says which run wrote them, so their groups are not used."""
    locations: dict[str, list[_EntryLocation]] = field(default_factory=dict)
    """Locations of each request's entries, in the order in which they count."""
    writer: RecordWriter | None = None


class Journal:
    """Reads and appends journal entries of a run for one worker process; not thread-safe."""

    def __init__(self, run_dir: str | Path, fingerprint: str, *, max_open_steps: int = MAX_OPEN_STEPS) -> None:
        """Open the journal of a run.

        Args:
            fingerprint: identifies the settings that determine the samples; see `journal_fingerprint`.
            max_open_steps: number of steps whose index and file are kept open.
        """
        self._max_open_steps = max_open_steps
        self._run_dir, self._folder = run_dir, journal_folder(run_dir)
        self._fingerprint = fingerprint
        self._steps: dict[int, _StepIndex] = {}

    def lookup(self, step: int, jobs: Sequence[GroupJob]) -> list[JournalEntry | None]:
        """Return the entry of each job of the step, or None for a job that no process has finished yet.

        Raises:
            DataError: the journal has another format.
            WorkerError: the journal belongs to another run, or cannot be read.
        """
        index = self._refresh_index(step)
        entries = [_find_entry(index, job.request_id, job_digest(job)) for job in jobs]
        for job, entry in zip(jobs, entries, strict=True):
            locations = index.locations.get(job.request_id)
            if entry is None and locations:
                logger.warning(
                    "%s: the journal has another job under this name (prompt %s, now %s); generating the group again",
                    job.request_id,
                    locations[0].record.meta["prompt_id"],
                    job.prompt.prompt_id,
                )
        return entries

    def request_ids(self, step: int) -> list[str]:
        """Return the ids of the requests of the step that have entries; raises as `lookup`."""
        return list(self._refresh_index(step).locations)

    def append(self, step: int, finished: Sequence[FinishedJob]) -> list[JournalEntry]:
        """Append groups of the step in one write.

        The files of other processes are read for the first groups of a step, and for jobs that another worker was sent
        before: to read all of them for each group would cost workers times groups.

        Returns:
            For each group the entry that counts: the existing one if another process was faster.

        Raises:
            DataError: the journal has another format.
            LostLockError: another run has taken over the run folder; nothing is written.
            WorkerError: the file cannot be written, or as `lookup`.
        """
        index = self._refresh_index(step, own_only=not any(group.job.num_resent for group in finished))
        entries: list[JournalEntry] = []
        new: dict[tuple[str, str], JournalEntry] = {}
        records: list[bytes] = []
        for group in finished:
            job, digest = group.job, job_digest(group.job)
            found = new.get((job.request_id, digest)) or _find_entry(index, job.request_id, digest)
            if found is None:
                records.append(_encode_entry(group, digest))
                found = new[job.request_id, digest] = JournalEntry(
                    request_id=job.request_id,
                    prompt_id=job.prompt.prompt_id,
                    summary=group.summary,
                    trajectories=list(group.trajectories),
                )
            entries.append(found)
        if records:
            self._write(step, index, b"".join(records), [request_id for request_id, _ in new])
        return entries

    def _refresh_index(self, step: int, *, own_only: bool = False) -> _StepIndex:
        """Return the step's index, updated with the records that were appended since the last call.

        Args:
            own_only: read only the file that this process writes, if it has begun one.
        """
        index = self._steps.pop(step, None) or _StepIndex()
        self._steps[step] = index
        while len(self._steps) > self._max_open_steps:
            oldest = self._steps.pop(next(iter(self._steps)))
            if oldest.writer:
                oldest.writer.close()
        if index.writer and not index.writer.path.exists():  # the step was removed from the journal
            index.writer.close()
            index = self._steps[step] = _StepIndex()
        folder, writer = step_folder(self._folder, step), index.writer
        try:
            own = [(writer.path, writer.path.stat().st_size)] if own_only and writer else None
            _read_new_records(index, _list_files(folder) if own is None else own, self._fingerprint)
        except OSError as e:
            raise WorkerError(f"the rollout journal {folder} cannot be read: {e}") from e
        return index

    def _write(self, step: int, index: _StepIndex, data: bytes, request_ids: Sequence[str]) -> None:
        require_lock(self._run_dir)
        path = index.writer.path if index.writer else step_folder(self._folder, step) / _make_file_name()
        try:
            if index.writer is None:
                index.writer = RecordWriter(path)
                index.writer.write(encode_record({"format": FORMAT, "fingerprint": self._fingerprint}))
            index.writer.write(data)
        except OSError as e:
            if index.writer:  # its file may end in an incomplete record
                index.writer.close()
                index.writer = None
            others = f" (and {len(request_ids) - 1} more)" if len(request_ids) > 1 else ""
            raise WorkerError(
                f"{request_ids[0]}{others} is done but cannot be written to the rollout journal {path}: {e}"
            ) from e


def open_journal(config: RunConfig) -> Journal:
    """Return the journal of a run, which keeps as many steps open as its schedule samples at the same time."""
    schedule = config.schedule.resolved()
    assert schedule.lookahead is not None
    assert schedule.max_staleness is not None
    num_steps = MAX_OPEN_STEPS + schedule.lookahead + schedule.max_staleness
    return Journal(config.run_dir, journal_fingerprint(config), max_open_steps=num_steps)


def journal_fingerprint(config: RunConfig) -> str:
    """Return a hash of the settings that determine the samples; runs with equal hashes may share a journal.

    Parallel layouts, engine sizes and output paths are left out: they affect nothing but rounding.
    """
    optimizer = config.trainer.optimizer.model_dump(mode="json")
    if config.trainer.optimizer.decay != "constant":
        optimizer["steps"] = config.trainer.steps
    relevant = {
        "format": FORMAT,
        "seed": config.seed,
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "reward": config.reward.model_dump(
            mode="json", exclude={"max_failed_share": True, "terms": {"__all__": set(SERVICE_SETTINGS)}}
        ),
        "sampling": config.rollout.sampling.model_dump(mode="json"),
        "max_new_tokens": config.rollout.max_new_tokens,
        "agent": config.rollout.agent.model_dump(mode="json"),
        "env": None if config.rollout.env is None else config.rollout.env.model_dump(mode="json"),
        **({} if config.rollout.harness is None else {"harness": config.rollout.harness.model_dump(mode="json")}),
        "optimizer": optimizer,
        # the policy versions that sample a group are those of the schedule's log, if there is one
        **({} if config.schedule.type == "sync" else {"schedule": config.schedule.type}),
        # groups of a run without them have no routes
        **({"routes": True} if config.trainer.moe.router_replay == "R3" else {}),
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def job_digest(job: GroupJob) -> str:
    """Return a hash of a job, equal for two jobs that request the same samples."""
    request_fields = (
        job.prompt.prompt_id,
        job.prompt.token_ids,
        job.prompt.answer,
        job.group_id,
        job.num_samples,
        job.sampling,
        job.seed,
        *(["has_baseline"] if job.has_baseline else []),
        *([job.prompt.other_answers] if job.prompt.other_answers else []),
    )
    return hashlib.sha256(repr(request_fields).encode()).hexdigest()[:16]


def parse_step(request_id: str) -> int | None:
    """Return the step of a request id `step-<step>-...-<group>` or `evaluate-<step>-<group>`; None for other ids."""
    match = _REQUEST.fullmatch(request_id)
    return int(match.group(1)) if match else None


def read_step(run_dir: str | Path, step: int) -> list[JournalEntry]:
    """Return the entries of one step in the order of the files, one per job.

    Raises:
        DataError: the journal has another format.
    """
    index = _StepIndex()
    _read_new_records(index, _list_files(step_folder(journal_folder(run_dir), step)), None)
    entries: dict[tuple[str, str], JournalEntry] = {}
    for request_id, locations in index.locations.items():
        for location in locations:
            key = request_id, location.record.meta["job"]
            entry = None if key in entries else _read_entry(location)
            if entry is not None:
                entries[key] = entry
    return list(entries.values())


def _list_files(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of a step's folder by name, each with its size."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        return sorted((Path(e.path), e.stat().st_size) for e in found if e.name.endswith(SUFFIX))


def _read_new_records(index: _StepIndex, files: Sequence[tuple[Path, int]], fingerprint: str | None) -> None:
    """Add the new records of files of a step's folder to the index.

    Args:
        files: each with its size.
        fingerprint: the fingerprint that the files must have; None accepts any.
    """
    for path, size in files:
        start = index.read.get(path, 0)
        if size == start or path in index.unowned:
            continue
        records, end = read_records(path, start)
        if start == 0 and end > 0 and not (records and "fingerprint" in records[0].meta):
            logger.warning("%s is damaged at its beginning; the groups in it are not used", path)
            index.unowned.add(path)
            continue
        for record in records:
            if "fingerprint" in record.meta:
                _check_owner(path, record.meta, fingerprint)
        index.read[path] = end
        for record in records:
            if "fingerprint" in record.meta:
                continue
            locations = index.locations.setdefault(record.meta["request_id"], [])
            locations.append(_EntryLocation(path, record))
            locations.sort(key=_precedence)


def _precedence(location: _EntryLocation) -> tuple[int, Path, int]:
    return -location.record.meta.get("num_resent", 0), location.path, location.record.start


def _check_owner(path: Path, meta: JsonMapping, fingerprint: str | None) -> None:
    """Check the record that says who wrote the records after it: the first one of a file, and any later one.

    Raises:
        DataError: the file has another format.
        WorkerError: the record's fingerprint is not `fingerprint`.
    """
    check_format(path, meta)
    got = meta["fingerprint"]
    if fingerprint not in (None, got):
        raise WorkerError(
            f"the rollout journal must belong to this run's configuration ({fingerprint}), but {path} belongs to "
            f"another one ({got}); move {path.parent.parent} away"
        )


def _encode_entry(group: FinishedJob, digest: str) -> bytes:
    """Return the record of a group; `digest`: that of its job."""
    summary = group.summary
    meta = {
        "request_id": group.job.request_id,
        "prompt_id": group.job.prompt.prompt_id,
        "job": digest,
        **({"num_resent": group.job.num_resent} if group.job.num_resent else {}),
        "generation_seconds": summary.generation_seconds,
        "scoring_seconds": summary.scoring_seconds,
        "terms": {name: asdict(report) for name, report in summary.terms.items()},
        **({"has_baseline": True} if summary.has_baseline else {}),
        **({"source": summary.source} if summary.source else {}),
    }
    return encode_record(meta, encode_group(group.trajectories))


def _find_entry(index: _StepIndex, request_id: str, digest: str) -> JournalEntry | None:
    """Return the first readable entry of the job with this digest; unreadable ones are removed from the index."""
    locations = index.locations.get(request_id, [])
    for location in [location for location in locations if location.record.meta["job"] == digest]:
        entry = _read_entry(location)
        if entry is not None:
            return entry
        locations.remove(location)
    return None


def _read_entry(location: _EntryLocation) -> JournalEntry | None:
    """Return the entry at `location`, or None with a logged warning if it is damaged or cannot be read."""
    meta = location.record.meta
    try:
        body = read_body(location.path, location.record)
    except OSError as e:
        logger.warning("%s of the rollout journal %s is not used: %s", meta["request_id"], location.path, e)
        return None
    if body is None:
        return None
    trajectories = decode_group(body)
    return JournalEntry(
        request_id=meta["request_id"],
        prompt_id=meta["prompt_id"],
        summary=GroupSummary(
            group_id=trajectories[0].group_id,
            prompt_id=meta["prompt_id"],
            trajectories=tuple(summarize(*segments) for segments in split_episodes(trajectories)),
            generation_seconds=meta["generation_seconds"],
            scoring_seconds=meta["scoring_seconds"],
            terms={name: TermReport(**report) for name, report in meta["terms"].items()},
            has_baseline=meta.get("has_baseline", False),
            source=meta.get("source", ""),
        ),
        trajectories=trajectories,
    )


def _make_file_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"


A = TypeVar("A")
R = TypeVar("R")


class Replay:
    """Looks jobs up in the journal and appends finished ones, without blocking the event loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: dict[tuple[Callable[..., Any], int], list[tuple[Any, asyncio.Future[Any]]]] = {}
        """By method of the journal and step, the arguments of calls that have not begun."""
        self._calling: asyncio.Task[None] | None = None

    async def lookup(self, step: int, job: GroupJob) -> JournalEntry | None:
        """Return the journal entry of the job, or None if there is none; raises as `Journal.lookup`.

        Jobs that are looked up together resume in the same iteration of the event loop, so that their requests still
        go to the engine in one call.
        """
        return await self._call(self._journal.lookup, step, job)

    async def append(
        self, step: int, job: GroupJob, summary: GroupSummary, trajectories: Sequence[Trajectory]
    ) -> JournalEntry:
        """Append the group to the journal and return the entry that counts; raises as `Journal.append`."""
        return await self._call(self._journal.append, step, FinishedJob(job, summary, trajectories))

    async def _call(self, method: Callable[[int, Sequence[A]], Sequence[R]], step: int, argument: A) -> R:
        """Return the item of `method(step, arguments)` for this one of the arguments."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.setdefault((method, step), []).append((argument, future))
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call_pending())
        return await future

    async def _call_pending(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            method, step = key = next(iter(self._pending))
            await call_for_all(partial(loop.run_in_executor, self._thread, method, step), self._pending.pop(key))
