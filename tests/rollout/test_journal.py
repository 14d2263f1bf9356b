"""The journal of finished groups, and its replay: read and written on one thread, for all groups that wait at once."""

import asyncio
import json
import logging
import multiprocessing
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt, TermReport, Trajectory
from megarl.config import RunConfig
from megarl.errors import DataError, WorkerError
from megarl.rollout.journal import (
    FinishedJob,
    Journal,
    Replay,
    journal_fingerprint,
    list_steps,
    parse_step,
    read_fingerprints,
    read_records,
    read_step,
    remove_steps,
)
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize
from tests.errors import expect_error
from tests.rollout.clock import in_event_loop
from tests.rollout.whole_batches import make_group_job
from tests.time_limits import HANG_SECONDS

STEP = 12
ARRAYS = ("token_ids", "loss_mask", "logprobs", "policy_versions")


def job(group=0, prompt_id=None, num_samples=3, label=f"step-{STEP}"):
    prompt = Prompt(prompt_id=prompt_id or f"train.jsonl:{group + 1}", text="", token_ids=(5, 6, 7), row={})
    names = {"seed": (0, STEP), "request_id": f"{label}-{group}"}
    return make_group_job(prompt, group_id=group, num_samples=num_samples, **names)


def trajectory(request, rng, sampled):
    n = 3 + sampled
    logprobs = rng.standard_normal(n).astype(np.float32)
    logprobs[:3] = [0.0, -0.0, np.nextafter(np.float32(0), np.float32(1))]
    return Trajectory(
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        token_ids=rng.integers(0, 2**31, n).astype(np.int32),
        loss_mask=np.repeat([False, True], [3, sampled]),
        logprobs=logprobs,
        policy_versions=np.repeat(np.array([-1, 11], np.int32), [3, sampled]),
        rewards={"zeta": float(rng.standard_normal()), "accuracy": 0.1 + 0.2},
        reward=float(rng.standard_normal()),
        reward_errors={"judge": "it took longer than 3 s", "style": "-"} if sampled == 1 else {},
        finish_reason="length" if sampled else "stop",
        routes=rng.integers(0, 300, (n, 3, 2)).astype(np.uint16 if sampled > 20 else np.uint8) if sampled else None,
    )


def finished_group(request, seed=0):
    """Return the summary and the trajectories of a job; its third sample is an empty completion."""
    rng = np.random.default_rng((seed, request.group_id))
    found = [trajectory(request, rng, sampled) for sampled in (17, 1, 0, 40)[: request.num_samples]]
    summary = GroupSummary(
        group_id=request.group_id,
        prompt_id=request.prompt.prompt_id,
        trajectories=tuple(map(summarize, found)),
        generation_seconds=0.1 + seed,
        scoring_seconds=1 / 3,
        terms={"accuracy": TermReport(seconds=0.1 + seed, num_retried=2)},
    )
    return summary, found


def journal(folder, fingerprint="ours"):
    return Journal(folder, fingerprint)


def append(writer, request, seed=0, step=STEP):
    """Append a finished group and return the entry that counts."""
    (entry,) = writer.append(step, [FinishedJob(request, *finished_group(request, seed))])
    return entry


def found_in(reader, count=3):
    """Return for the first jobs whether the journal has their groups."""
    return [entry is not None for entry in reader.lookup(STEP, [job(group) for group in range(count)])]


def assert_holds(reader, request, seed=0):
    """The journal has the group that the job finished with the seed."""
    assert as_bits(reader.lookup(STEP, [request])[0]) == as_bits(finished_group(request, seed))


def as_bits(group):
    summary, found = (group.summary, group.trajectories) if hasattr(group, "summary") else group
    plain = [f.name for f in fields(Trajectory) if f.name not in (*ARRAYS, "routes")]
    return summary, [
        [getattr(t, name) for name in plain]
        + [list(t.rewards), list(t.reward_errors)]
        + [(getattr(t, name).dtype, getattr(t, name).tobytes()) for name in ARRAYS]
        + [None if t.routes is None else (t.routes.dtype, t.routes.shape, t.routes.tobytes())]
        for t in found
    ]


def write_journal(folder, count=3):
    writer = journal(folder)
    for group in range(count):
        append(writer, job(group))
    return only_file(folder)


def only_file(folder):
    (path,) = (folder / "journal" / "step-000012").iterdir()
    return path


def damaged(path, where):
    """Return the bytes of the file with another one at `where`."""
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    return data


def test_another_process_reads_a_group_bit_for_bit(tmp_path):
    appended = [append(journal(tmp_path), job(g)) for g in range(3)]
    found = journal(tmp_path).lookup(STEP, [job(2), job(3), job(0)])
    assert found[1] is None
    assert as_bits(found[0]) == as_bits(appended[2]) == as_bits(finished_group(job(2)))
    assert as_bits(found[2]) == as_bits(finished_group(job(0)))
    assert found[0].trajectories[0].token_ids.flags.writeable
    assert [tuple(t.reward_errors) for t in found[0].summary.trajectories] == [(), ("judge", "style"), ()]
    assert found[0].summary.kept == (0, 2)
    assert {g.request_id: as_bits(g) for g in read_step(tmp_path, STEP)} == {
        f"step-12-{g}": as_bits(finished_group(job(g))) for g in range(3)
    }


def test_lookup_sees_new_groups_of_all_writers(tmp_path):
    ours, theirs = journal(tmp_path), journal(tmp_path)
    assert found_in(ours, 2) == [False, False]
    append(ours, job(0))
    append(theirs, job(1))
    assert found_in(ours, 2) == found_in(theirs, 2) == [True, True]
    assert ours.lookup(STEP + 1, [job(0)]) == [None]


def test_killed_writer_loses_only_its_last_group(tmp_path):
    path = write_journal(tmp_path)
    complete = path.read_bytes()
    records, end = read_records(path)
    assert end == len(complete)
    before = records[-2].start + records[-2].length
    for cut in range(before, len(complete), 7):
        path.write_bytes(complete[:cut])
        assert found_in(journal(tmp_path)) == [True, True, False], cut
        assert_holds(journal(tmp_path), job(1))
    for cut in range(0, records[0].start, 5):
        path.write_bytes(complete[:cut])
        assert journal(tmp_path).lookup(STEP, [job(0)]) == [None]


def test_incomplete_record_is_read_once_it_is_complete(tmp_path):
    path = write_journal(tmp_path)
    complete = path.read_bytes()
    path.write_bytes(complete[:-9])
    reader = journal(tmp_path)
    assert reader.lookup(STEP, [job(2)]) == [None]
    path.write_bytes(complete)
    assert_holds(reader, job(2))


@pytest.mark.parametrize("part", ["body", "header", "meta", "beginning"])
def test_damage_is_logged_and_its_group_is_generated_again(tmp_path, caplog, part):
    path = write_journal(tmp_path)
    records, _ = read_records(path)
    end = records[1].start + records[1].length  # of group 0
    where = {"body": records[2].start + 100, "header": end + 5, "meta": records[2].start - 3, "beginning": 30}[part]
    path.write_bytes(damaged(path, where))
    with caplog.at_level(logging.WARNING):
        found = found_in(journal(tmp_path))
    assert found == {"body": [1, 0, 1], "meta": [1, 0, 1], "header": [1, 0, 0], "beginning": [0, 0, 0]}[part]
    assert str(path) in caplog.text
    append(journal(tmp_path), job(1), seed=5)
    assert_holds(journal(tmp_path), job(1), seed=5)


@pytest.mark.parametrize("where", [5, 30], ids=["header", "meta"])
@pytest.mark.parametrize("num_seen", [1, 2], ids=["beginning", "beginning and a group"])
def test_groups_appended_to_a_file_with_a_damaged_beginning_are_not_used(tmp_path, caplog, where, num_seen):
    """The file's owner is unknown, also for a reader that has seen the damage in an earlier lookup."""
    path = write_journal(tmp_path)
    seen = read_records(path)[0][num_seen - 1]
    data = damaged(path, where)
    path.write_bytes(data[: seen.start + seen.length])
    reader = journal(tmp_path)
    jobs = [job(group) for group in range(3)]
    assert reader.lookup(STEP, jobs) == [None] * 3
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert reader.lookup(STEP, jobs) == journal(tmp_path).lookup(STEP, jobs) == [None] * 3
    assert f"{path} is damaged at its beginning; the groups in it are not used" in caplog.text
    assert read_step(tmp_path, STEP) == []


def test_append_returns_the_entry_that_was_written_first(tmp_path):
    first, late = journal(tmp_path), journal(tmp_path)
    assert late.lookup(STEP, [job()]) == [None]
    append(first, job(), seed=1)
    assert as_bits(append(late, job(), seed=2)) == as_bits(finished_group(job(), seed=1))
    assert only_file(tmp_path)


def test_all_readers_choose_the_same_of_two_entries(tmp_path):
    """The first in the order of file names counts, whichever was read first."""
    folder = tmp_path / "run" / "journal" / "step-000012"
    folder.mkdir(parents=True)
    early = journal(tmp_path / "run")
    for name, seed in (("z", 1), ("a", 0)):
        append(journal(tmp_path / name), job(), seed=seed)
        only_file(tmp_path / name).rename(folder / f"{name}.groups")
        assert as_bits(early.lookup(STEP, [job()])[0]) == as_bits(finished_group(job(), seed=seed))
    for late in (journal(tmp_path / "run").lookup(STEP, [job()]), read_step(tmp_path / "run", STEP)):
        assert [as_bits(g) for g in late] == [as_bits(finished_group(job(), seed=0))]


@pytest.mark.parametrize(
    "other", [job(prompt_id="train.jsonl:9"), job(num_samples=2), replace(job(), seed=(1, STEP))], ids=str
)
def test_different_job_with_the_same_id_is_logged_and_generated_again(tmp_path, caplog, other):
    write_journal(tmp_path, count=1)
    again = journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert again.lookup(STEP, [other]) == [None]
    assert "step-12-0: the journal has another job under this name (prompt train.jsonl:1" in caplog.text
    append(again, other)
    assert_holds(journal(tmp_path), other)
    assert_holds(journal(tmp_path), job())


def test_journal_of_another_run_is_rejected(tmp_path):
    path = write_journal(tmp_path)
    other = journal(tmp_path, "theirs")
    message = rf"\(theirs\), but {path} belongs to another one \(ours\); move .*journal away"
    for _ in range(2):
        with pytest.raises(WorkerError, match=message):
            other.lookup(STEP, [job()])
    assert read_fingerprints(tmp_path) == {"ours"}
    (tmp_path / "journal").rename(tmp_path / "journal.1")
    assert other.lookup(STEP, [job()]) == [None]
    assert read_fingerprints(tmp_path) == set()


def test_records_of_another_run_in_the_same_file_are_rejected(tmp_path):
    path = write_journal(tmp_path / "run", count=1)
    reader = journal(tmp_path / "run")
    assert reader.lookup(STEP, [job(0), job(1)])[1] is None
    append(journal(tmp_path / "other", "theirs"), job(1))
    path.write_bytes(path.read_bytes() + only_file(tmp_path / "other").read_bytes())
    for each in (reader, reader, journal(tmp_path / "run")):
        with pytest.raises(WorkerError, match=rf"\(ours\), but {path} belongs to another one \(theirs\); move "):
            each.lookup(STEP, [job(1)])
    assert read_fingerprints(tmp_path / "run") == {"ours", "theirs"}


def handwritten_record(meta):
    """Return the bytes of a record without a body, independently of the code under test."""
    text = json.dumps(meta).encode()
    head = struct.pack("<4sIIII", b"mgrj", len(text), 0, zlib.crc32(text), zlib.crc32(b""))
    return head + struct.pack("<I", zlib.crc32(head)) + text


@pytest.mark.parametrize(("first", "got"), [({}, 1), ({"format": 7}, 7)])
def test_journal_of_another_format_is_rejected(tmp_path, first, got):
    """Format 1 did not write its number."""
    folder = tmp_path / "journal" / "step-000012"
    folder.mkdir(parents=True)
    entry = {"request_id": "step-12-0", "prompt_id": "train.jsonl:1", "job": "0" * 16}
    entry |= {"generation_seconds": 0.1, "scoring_seconds": 0.1}
    old = handwritten_record(first | {"fingerprint": "ours"}) + handwritten_record(entry)
    (folder / "host-1-0.groups").write_bytes(old)
    reader = journal(tmp_path)
    message = (
        rf"^the rollout journal {tmp_path}/journal has format {got}, but this version of megarl reads format 6: "
        r"start a new run, or resume with the version that wrote the journal$"
    )
    lookup = partial(reader.lookup, STEP, [job()])
    others = [partial(append, reader, job()), partial(read_step, tmp_path, STEP), partial(read_fingerprints, tmp_path)]
    for read in (lookup, lookup, *others):
        with pytest.raises(DataError, match=message):
            read()
    assert only_file(tmp_path).read_bytes() == old


def test_handwritten_record_of_this_format_is_accepted(tmp_path):
    path = write_journal(tmp_path)
    first = handwritten_record({"format": 6, "fingerprint": "ours"})
    assert path.read_bytes().startswith(first)
    path.write_bytes(first)
    assert read_fingerprints(tmp_path) == {"ours"}
    assert journal(tmp_path).lookup(STEP, [job()]) == [None]


def test_groups_that_are_appended_together_count_once(tmp_path):
    """Of two groups of the same job the first one counts, also one of another process; other jobs get their own."""
    theirs = append(journal(tmp_path), job(0), seed=5)
    requests = [job(0), job(1), job(1), job(1, prompt_id="another"), job(2)]
    groups = [finished_group(request, seed) for seed, request in enumerate(requests)]
    writer = journal(tmp_path)
    found = writer.append(STEP, [FinishedJob(request, *group) for request, group in zip(requests, groups, strict=True)])
    expected = [theirs, groups[1], groups[1], groups[3], groups[4]]
    assert list(map(as_bits, found)) == list(map(as_bits, expected))
    assert len(read_step(tmp_path, STEP)) == 4
    assert writer.append(STEP, []) == []


def test_write_error_names_the_file(tmp_path):
    (tmp_path / "journal").write_text("a file where the folder belongs")
    with expect_error(WorkerError, "step-12-0", "step-000012/"):
        append(journal(tmp_path), job())


def test_full_disk_keeps_earlier_groups(tmp_path, monkeypatch):
    writer = journal(tmp_path)
    append(writer, job(0))
    write = os.write

    def full(descriptor, data):
        write(descriptor, data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with expect_error(WorkerError, "No", "device", "space"):
        append(writer, job(1))
    monkeypatch.setattr(os, "write", write)
    append(writer, job(2))
    assert found_in(journal(tmp_path)) == [True, False, True]


def test_remove_steps(tmp_path):
    assert list_steps(tmp_path) == []
    remove_steps(tmp_path, up_to=3)
    writer = journal(tmp_path)
    for step in (0, 2, 9, 10, 11):
        append(writer, job(), step=step)
    (tmp_path / "journal" / "step-000009.kept").mkdir()
    assert list_steps(tmp_path) == [0, 2, 9, 10, 11]
    remove_steps(tmp_path, up_to=2)
    assert list_steps(tmp_path) == [9, 10, 11]
    assert len(read_step(tmp_path, 9)) == 1
    assert read_step(tmp_path, 2) == []
    assert writer.lookup(2, [job()]) == [None]


def test_step_that_cannot_be_removed_is_removed_by_the_next_call(tmp_path, monkeypatch):
    """On NFS, removing a file that a process has open renames it instead, so that its folder is not empty."""
    writer = journal(tmp_path)
    for step in (1, 2, 3):
        append(writer, job(), step=step)
    rmdir = os.rmdir

    def busy(path, **given):
        if str(path).endswith("step-000002"):
            raise OSError(39, "Directory not empty")
        rmdir(path, **given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        remove_steps(tmp_path, up_to=2)
        assert list_steps(tmp_path) == [2, 3]
    remove_steps(tmp_path, up_to=2)
    assert list_steps(tmp_path) == [3]


def test_parse_step():
    assert {parse_step(f"step-12-{rest}") for rest in ("3", "1-3", "greedy-3", "1-greedy-3")} == {12}
    assert [parse_step(request_id) for request_id in ("evaluate-10-3", "evaluate-3", "1-3")] == [10, None, None]


def config(**changes):
    sections = {"run_dir": "runs/a", "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    return journal_fingerprint(RunConfig.model_validate(sections | changes))


def test_fingerprint_depends_on_settings_that_determine_the_samples():
    base = config()
    same = [{"run_dir": "runs/b"}, {"trainer": {"steps": 7}}, {"checkpoint": {"every": 3}}, {"rollout": {"workers": 2}}]
    assert {config(**changes) for changes in (*same, {"tracking": {"rollouts": False}})} == {base}
    other = [
        {"seed": 1},
        {"model": {"path": "n"}},
        {"data": {"path": "e.jsonl"}},
        {"rollout": {"sampling": {"temperature": 0.5}}},
        {"rollout": {"max_new_tokens": 5}},
        {"rollout": {"agent": {"path": "my_agents:run"}}},
        {"rollout": {"agent": {"path": "my_agents:run", "kwargs": {"turns": 2}}}},
        {"rollout": {"agent": {"path": "my_agents:run", "kwargs": {"turns": 3}}}},
        {"trainer": {"optimizer": {"lr": 1.0}}},
        {"trainer": {"optimizer": {"decay": "linear"}}},
        {"trainer": {"optimizer": {"decay": "linear"}, "steps": 7}},
        {"trainer": {"moe": {"router_replay": "R3"}}},
        {"algorithm": {"type": "grpo", "group_size": 3}},
        {"reward": {"terms": {"accuracy": {"type": "numeric", "weight": 2.0}}}},
    ]
    assert len({base, *(config(**changes) for changes in other)}) == len(other) + 1


def test_fingerprint_does_not_depend_on_how_a_service_is_called():
    def service(**fields):
        return config(reward={"terms": {"tests": {"type": "http", "url": "http://a", **fields}}})

    same = [{"url": "http://b"}, {"max_retries": 1}, {"timeout_seconds": 1.0}, {"max_batch_size": 1}]
    assert {service(**fields) for fields in same} == {service()}
    assert service(weight=2.0) != service() != service(on_error="raise")
    assert config(reward={"max_failed_share": 0.5}) == config()


def append_until_killed(folder, first, written):
    writer = journal(folder)
    for group in range(first, 10**6):
        append(writer, job(group))
        os.write(written, group.to_bytes(4, "little"))


def test_appended_groups_survive_a_killed_process(tmp_path):
    for incarnation in range(3):
        read_end, write_end = os.pipe()
        arguments = (tmp_path, incarnation * 10_000, write_end)
        child = multiprocessing.get_context("fork").Process(target=append_until_killed, args=arguments)
        child.start()
        os.close(write_end)
        num_bytes = 4 * (20 + 7 * incarnation)
        with open(read_end, "rb") as written:
            data = written.read(num_bytes)
            child.kill()
            child.join()
            assert len(data) == num_bytes, "the process has ended"
            data += written.read()
        groups = np.frombuffer(data, np.uint32).tolist()
        found = journal(tmp_path).lookup(STEP, [job(group) for group in groups])
        assert [as_bits(g) for g in found] == [as_bits(finished_group(job(group))) for group in groups]
    assert len(read_step(tmp_path, STEP)) >= 3


class SlowJournal(Journal):
    """Waits in each call until `go` is set, and keeps the numbers of jobs of the calls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "ours")
        self.go, self.busy = threading.Event(), threading.Event()
        self.num_appended, self.num_looked_up = list[int](), list[int]()

    def append(self, step: int, finished: Sequence[FinishedJob]) -> Any:
        self.num_appended.append(len(finished))
        self.busy.set()
        assert self.go.wait(HANG_SECONDS)
        return super().append(step, finished)

    def lookup(self, step: int, jobs: Sequence[GroupJob]) -> Any:
        self.num_looked_up.append(len(jobs))
        return super().lookup(step, jobs)


async def begin_appends(replay: Replay, journal: SlowJournal, jobs: Sequence[GroupJob]) -> list[asyncio.Task[Any]]:
    """Append the first job, and the others while the journal's thread works on it."""
    tasks = [asyncio.create_task(replay.append(STEP, jobs[0], *finished_group(jobs[0])))]
    assert await asyncio.to_thread(journal.busy.wait, HANG_SECONDS)
    tasks += [asyncio.create_task(replay.append(STEP, each, *finished_group(each))) for each in jobs[1:]]
    await asyncio.sleep(0)
    journal.go.set()
    return tasks


@in_event_loop
async def test_groups_that_finish_while_the_journal_is_busy_are_written_together(tmp_path, monkeypatch) -> None:
    journal = SlowJournal(tmp_path)
    replay, jobs = Replay(journal), [job(group) for group in range(6)]
    writes, write = list[int](), os.write

    def counted(descriptor: int, data: Any) -> int:
        if threading.current_thread().name.startswith("journal"):
            writes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    entries = await asyncio.gather(*await begin_appends(replay, journal, jobs))
    assert journal.num_appended == [1, 5]
    assert len(writes) == 3  # the file's header record, the first group, and the five others
    assert [as_bits(entry) for entry in entries] == [as_bits(finished_group(each)) for each in jobs]
    assert [as_bits(entry) for entry in read_step(tmp_path, STEP)] == [as_bits(entry) for entry in entries]


@in_event_loop
async def test_jobs_that_begin_together_are_looked_up_together(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    journal.go.set()
    replay = Replay(journal)
    await replay.append(STEP, job(1), *finished_group(job(1)))
    found = await asyncio.gather(*(replay.lookup(STEP, job(group)) for group in range(3)))
    assert journal.num_looked_up == [3]
    assert [entry is not None for entry in found] == [False, True, False]


@in_event_loop
async def test_an_error_reaches_all_groups_of_the_call_and_no_others(tmp_path, monkeypatch) -> None:
    journal = SlowJournal(tmp_path)
    replay, jobs = Replay(journal), [job(group) for group in range(4)]
    write, count = journal._write, 0

    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    def fail_second(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with monkeypatch.context() as patch:
            if count == 2:
                patch.setattr(os, "write", full)
            write(*arguments)

    monkeypatch.setattr(journal, "_write", fail_second)
    first, *others = await asyncio.gather(*await begin_appends(replay, journal, jobs), return_exceptions=True)
    assert as_bits(first) == as_bits(finished_group(jobs[0]))
    for error in others:
        assert isinstance(error, WorkerError)
        assert str(error).startswith("step-12-1 (and 2 more) is done but cannot be written to ")
    again = await replay.append(STEP, jobs[1], *finished_group(jobs[1], seed=9))
    assert as_bits(again) == as_bits(finished_group(jobs[1], seed=9))


@in_event_loop
async def test_a_group_whose_caller_has_gone_is_written(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    replay, jobs = Replay(journal), [job(group) for group in range(3)]
    journal.go.set()
    tasks = [asyncio.create_task(replay.append(STEP, each, *finished_group(each))) for each in jobs]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert len(read_step(tmp_path, STEP)) == 3


def test_files_of_others_are_listed_for_lookups_and_the_first_groups_of_a_step(tmp_path, monkeypatch):
    """Otherwise, all workers would look at the files of all workers for each group."""
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    workers = [journal(tmp_path) for _ in range(8)]
    for number, worker in enumerate(workers):
        assert worker.lookup(STEP, [job(100 * number + group) for group in range(10)]) == [None] * 10
    for group in range(10):
        for number, worker in enumerate(workers):
            append(worker, job(100 * number + group))
    assert len(listed) <= 2 * len(workers)
    assert len(read_step(tmp_path, STEP)) == 80


@pytest.mark.parametrize("late_is_lost", [True, False])
def test_the_worker_that_was_sent_a_job_again_counts(tmp_path, late_is_lost):
    """Two workers have the job, as contact with the first one was lost; the run has the groups of the second one."""
    lost, restarted = journal(tmp_path), journal(tmp_path)
    again = replace(job(), num_resent=1)
    for worker in (lost, restarted):
        append(worker, job(5))
    assert restarted.lookup(STEP, [again]) == [None]
    if not late_is_lost:
        append(lost, job(), seed=1)
    used = append(restarted, again, seed=2)
    if late_is_lost:
        append(lost, job(), seed=1)
    assert as_bits(used) == as_bits(finished_group(job(), seed=2 if late_is_lost else 1))
    assert_holds(journal(tmp_path), job(), seed=2 if late_is_lost else 1)
    assert_holds(journal(tmp_path), again, seed=2 if late_is_lost else 1)


def test_a_step_that_was_removed_is_written_anew(tmp_path):
    writer = journal(tmp_path)
    append(writer, job())
    remove_steps(tmp_path, up_to=STEP)
    append(writer, job(1))
    assert found_in(journal(tmp_path), 2) == [False, True]
