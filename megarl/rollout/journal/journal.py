"""Finished groups, written down before they are used, so that none is ever generated twice.

    <run_dir>/journal/step-000012/<host>-<pid>-<random>.groups     one file a worker process and step

Of several groups that answer the same request, the first one counts, files in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.errors import WorkerError
from megarl.rollout.journal.group_codec import decode_group, encode_group
from megarl.rollout.journal.journal_folder import SUFFIX, journal_folder, step_folder
from megarl.rollout.journal.record_file import Frame, FrameWriter, frame, read_body, scan
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize

logger = logging.getLogger(__name__)

FORMAT = 1
KEPT_STEPS = 2
"""Whose index a worker keeps: the step under way, and a late answer's."""

_REQUEST = re.compile(r"(?:step|evaluate)-(\d+)-(?:.+-)?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledGroup:
    """A finished job as it was answered."""

    request_id: str
    prompt_id: str
    summary: GroupSummary
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    frame: Frame


@dataclass(slots=True)
class _Step:
    """What is known of one step's folder."""

    read: dict[Path, int] = field(default_factory=dict)
    """How far each file has been read, in bytes."""
    places: dict[str, list[_Place]] = field(default_factory=dict)
    """By request, in the order in which they count."""
    writer: FrameWriter | None = None


class Journal:
    """What a worker process reads and writes of a run's journal; not for several threads at once."""

    def __init__(self, run_dir: str | Path, fingerprint: str) -> None:
        """`fingerprint`: of what decides the samples; see `fingerprint_of`."""
        self._folder = journal_folder(run_dir)
        self._fingerprint = fingerprint
        self._steps: dict[int, _Step] = {}

    def find(self, step: int, jobs: Sequence[GroupJob]) -> list[JournaledGroup | None]:
        """For each job of the step its group, where one has finished, of whichever process.

        Raises:
            WorkerError: the journal is of another run, or cannot be read.
        """
        known = self._refreshed(step)
        groups = [_answer(known, job) for job in jobs]
        for job, group in zip(jobs, groups, strict=True):
            places = known.places.get(job.request_id)
            if group is None and places:
                logger.warning(
                    "%s: the journal has another job under this name (prompt %s, now %s); its group is generated again",
                    job.request_id,
                    places[0].frame.meta["prompt_id"],
                    job.prompt.prompt_id,
                )
        return groups

    def keep(
        self, step: int, job: GroupJob, summary: GroupSummary, trajectories: Sequence[Trajectory]
    ) -> JournaledGroup:
        """Write the group down; what is returned is the one that counts: another's, where that was there before.

        Raises:
            WorkerError: the file cannot be written, or as `find`.
        """
        known = self._refreshed(step)
        found = _answer(known, job)
        if found is not None:
            return found
        meta = {
            "request_id": job.request_id,
            "prompt_id": job.prompt.prompt_id,
            "job": job_digest(job),
            "generation_seconds": summary.generation_seconds,
            "scoring_seconds": summary.scoring_seconds,
        }
        self._write(step, known, frame(meta, encode_group(trajectories)), job.request_id)
        return JournaledGroup(
            request_id=job.request_id,
            prompt_id=job.prompt.prompt_id,
            summary=summary,
            trajectories=list(trajectories),
        )

    def _refreshed(self, step: int) -> _Step:
        """The step's index, with what has been added to its folder since."""
        known = self._steps.pop(step, None) or _Step()
        self._steps[step] = known
        while len(self._steps) > KEPT_STEPS:
            oldest = self._steps.pop(next(iter(self._steps)))
            if oldest.writer:
                oldest.writer.close()
        folder = step_folder(self._folder, step)
        try:
            _refresh(known, folder, self._fingerprint)
        except OSError as e:
            raise WorkerError(f"the rollout journal {folder} cannot be read: {e}") from e
        return known

    def _write(self, step: int, known: _Step, data: bytes, request_id: str) -> None:
        path = known.writer.path if known.writer else step_folder(self._folder, step) / _file_name()
        try:
            if known.writer is None:
                known.writer = FrameWriter(path)
                known.writer.write(frame({"fingerprint": self._fingerprint}))
            known.writer.write(data)
        except OSError as e:
            if known.writer:  # half a frame may be at its end
                known.writer.close()
                known.writer = None
            raise WorkerError(f"{request_id} is done and cannot be written to the rollout journal {path}: {e}") from e


def fingerprint_of(config: RunConfig) -> str:
    """Equal of two configurations where one's journal answers the other's requests.

    Layouts, engines' sizes and what is written where may differ: they decide nothing but rounding.
    """
    optimizer = config.trainer.optimizer.model_dump(mode="json")
    if config.trainer.optimizer.decay != "constant":
        optimizer["steps"] = config.trainer.steps
    decides = {
        "format": FORMAT,
        "seed": config.seed,
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "reward": config.reward.model_dump(mode="json"),
        "sampling": config.rollout.sampling.model_dump(mode="json"),
        "max_new_tokens": config.rollout.max_new_tokens,
        "optimizer": optimizer,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def job_digest(job: GroupJob) -> str:
    """Equal of two jobs that ask for the same samples."""
    asks = (
        job.prompt.prompt_id,
        job.prompt.token_ids,
        job.prompt.answer,
        job.group_id,
        job.num_samples,
        job.sampling,
        job.seed,
    )
    return hashlib.sha256(repr(asks).encode()).hexdigest()[:16]


def step_of(request_id: str) -> int | None:
    """The step that the request `step-<step>-...-<group>` or `evaluate-<step>-<group>` belongs to; None: to none."""
    match = _REQUEST.fullmatch(request_id)
    return int(match.group(1)) if match else None


def read_step(run_dir: str | Path, step: int) -> list[JournaledGroup]:
    """Every group that counts of one step, in the order of the files; one a job."""
    known = _Step()
    _refresh(known, step_folder(journal_folder(run_dir), step), None)
    groups: dict[tuple[str, str], JournaledGroup] = {}
    for request_id, places in known.places.items():
        for place in places:
            key = request_id, place.frame.meta["job"]
            group = None if key in groups else _read(place)
            if group is not None:
                groups[key] = group
    return list(groups.values())


def _refresh(known: _Step, folder: Path, fingerprint: str | None) -> None:
    """Read what is new in a step's folder; `fingerprint`: what its files need to have, None: any."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        files = sorted((Path(e.path), e.stat().st_size) for e in entries if e.name.endswith(SUFFIX))
    for path, size in files:
        begun = known.read.get(path, 0)
        if size == begun:
            continue
        frames, end = scan(path, begun)
        if begun == 0 and frames:
            frames = frames[1:] if _is_owned(path, frames[0].meta, fingerprint) else []
        known.read[path] = end
        for f in frames:
            places = known.places.setdefault(f.meta["request_id"], [])
            places.append(_Place(path, f))
            places.sort(key=lambda place: (place.path, place.frame.start))


def _is_owned(path: Path, meta: Mapping[str, Any], fingerprint: str | None) -> bool:
    """Whether the file says whose it is, by its first frame, as every whole one does."""
    got = meta.get("fingerprint")
    if got is None:
        logger.warning("%s is damaged at its beginning; the groups in it are not used", path)
    elif fingerprint not in (None, got):
        raise WorkerError(
            f"the rollout journal needs to be of this run's configuration ({fingerprint}), got {path} of another one "
            f"({got}); move {path.parent.parent} away"
        )
    return got is not None


def _answer(known: _Step, job: GroupJob) -> JournaledGroup | None:
    """The first group of the job that can be read; those that cannot are forgotten."""
    digest, places = job_digest(job), known.places.get(job.request_id, [])
    for place in [place for place in places if place.frame.meta["job"] == digest]:
        group = _read(place)
        if group is not None:
            return group
        places.remove(place)
    return None


def _read(place: _Place) -> JournaledGroup | None:
    """None where it is damaged, or gone."""
    meta = place.frame.meta
    try:
        body = read_body(place.path, place.frame)
    except OSError as e:
        logger.warning("%s of the rollout journal %s is not used: %s", meta["request_id"], place.path, e)
        return None
    if body is None:
        return None
    trajectories = decode_group(body)
    return JournaledGroup(
        request_id=meta["request_id"],
        prompt_id=meta["prompt_id"],
        summary=GroupSummary(
            group_id=trajectories[0].group_id,
            prompt_id=meta["prompt_id"],
            trajectories=tuple(summarize(trajectory) for trajectory in trajectories),
            generation_seconds=meta["generation_seconds"],
            scoring_seconds=meta["scoring_seconds"],
        ),
        trajectories=trajectories,
    )


def _file_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
