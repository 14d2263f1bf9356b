import json
import logging
import os
import signal
import struct
import zlib
from dataclasses import fields, replace

import numpy as np
import pytest

from megarl.batch.scored_group import TermReport
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config import RunConfig
from megarl.errors import DataError, WorkerError
from megarl.rollout.journal.journal import FinishedJob, Journal, journal_fingerprint, parse_step, read_step
from megarl.rollout.journal.journal_folder import list_steps, read_fingerprints, remove_steps
from megarl.rollout.journal.record_file import read_records
from megarl.rollout.rollout_worker import GroupSummary, summarize
from tests.rollout.whole_batches import make_group_job

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
    )


def finished_group(request, seed=0):
    """Return the summary and the trajectories of a job; its third sample is an empty completion."""
    rng = np.random.default_rng((seed, request.group_id))
    found = [trajectory(request, rng, sampled) for sampled in (17, 1, 0, 40)[: request.num_samples]]
    summary = GroupSummary(
        group_id=request.group_id,
        prompt_id=request.prompt.prompt_id,
        trajectories=tuple(summarize(t) for t in found),
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


def found_in(reader, count=3, step=STEP):
    """Return for the first jobs whether the journal has their groups."""
    return [entry is not None for entry in reader.lookup(step, [job(group) for group in range(count)])]


def assert_holds(reader, request, seed=0):
    """The journal has the group that the job finished with the seed."""
    assert as_bits(reader.lookup(STEP, [request])[0]) == as_bits(finished_group(request, seed))


def as_bits(group):
    summary, found = (group.summary, group.trajectories) if hasattr(group, "summary") else group
    plain = [f.name for f in fields(Trajectory) if f.name not in ARRAYS]
    return summary, [
        [getattr(t, name) for name in plain]
        + [list(t.rewards), list(t.reward_errors)]
        + [(getattr(t, name).dtype, getattr(t, name).tobytes()) for name in ARRAYS]
        for t in found
    ]


def write_journal(folder, count=3):
    writer = journal(folder)
    for group in range(count):
        append(writer, job(group))
    (path,) = (folder / "journal" / "step-000012").iterdir()
    return path


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
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = found_in(journal(tmp_path))
    survive = {"body": [1, 0, 1], "meta": [1, 0, 1], "header": [1, 0, 0], "beginning": [0, 0, 0]}[part]
    assert found == [bool(s) for s in survive]
    assert str(path) in caplog.text
    writer = journal(tmp_path)
    append(writer, job(1), seed=5)
    assert_holds(journal(tmp_path), job(1), seed=5)


@pytest.mark.parametrize("where", [5, 30], ids=["header", "meta"])
@pytest.mark.parametrize("num_seen", [1, 2], ids=["beginning", "beginning and a group"])
def test_groups_appended_to_a_file_with_a_damaged_beginning_are_not_used(tmp_path, caplog, where, num_seen):
    """The file's owner is unknown, also for a reader that has seen the damage in an earlier lookup."""
    path = write_journal(tmp_path)
    seen = read_records(path)[0][num_seen - 1]
    data = bytearray(path.read_bytes())
    data[where] ^= 1
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
    assert len(list((tmp_path / "journal" / "step-000012").iterdir())) == 1


def test_all_readers_choose_the_same_of_two_entries(tmp_path):
    """The first in the order of file names counts, whichever was read first."""
    folder = tmp_path / "run" / "journal" / "step-000012"
    folder.mkdir(parents=True)
    early = journal(tmp_path / "run")
    for name, seed in (("z", 1), ("a", 0)):
        append(journal(tmp_path / name), job(), seed=seed)
        (path,) = (tmp_path / name / "journal" / "step-000012").iterdir()
        path.rename(folder / f"{name}.groups")
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
    for _ in range(2):
        with pytest.raises(
            WorkerError, match=rf"\(theirs\), but {path} belongs to another one \(ours\); move .*journal away"
        ):
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
    (other,) = (tmp_path / "other" / "journal" / "step-000012").iterdir()
    path.write_bytes(path.read_bytes() + other.read_bytes())
    for each in (reader, reader, journal(tmp_path / "run")):
        with pytest.raises(WorkerError, match=rf"\(ours\), but {path} belongs to another one \(theirs\); move "):
            each.lookup(STEP, [job(1)])
    assert read_fingerprints(tmp_path / "run") == {"ours", "theirs"}


def handwritten_record(meta):
    """Return the bytes of a record without a body, independently of the code under test."""
    text = json.dumps(meta).encode()
    head = struct.pack("<4sIIII", b"mgrj", len(text), 0, zlib.crc32(text), zlib.crc32(b""))
    return head + struct.pack("<I", zlib.crc32(head)) + text


@pytest.mark.parametrize(("first", "got"), [({}, 1), ({"format": 6}, 6)])
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
        rf"^the rollout journal {tmp_path}/journal has format {got}, but this version of megarl reads format 5: "
        r"start a new run, or resume with the version that wrote the journal$"
    )
    for read in (
        lambda: reader.lookup(STEP, [job()]),
        lambda: reader.lookup(STEP, [job()]),
        lambda: append(reader, job()),
        lambda: read_step(tmp_path, STEP),
        lambda: read_fingerprints(tmp_path),
    ):
        with pytest.raises(DataError, match=message):
            read()
    assert (folder / "host-1-0.groups").read_bytes() == old
    assert len(list(folder.iterdir())) == 1


def test_handwritten_record_of_this_format_is_accepted(tmp_path):
    path = write_journal(tmp_path)
    first = handwritten_record({"format": 5, "fingerprint": "ours"})
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
    assert [as_bits(entry) for entry in found] == [as_bits(group) for group in expected]
    assert len(read_step(tmp_path, STEP)) == 4
    assert writer.append(STEP, []) == []


def test_write_error_names_the_file(tmp_path):
    (tmp_path / "journal").write_text("a file where the folder belongs")
    with pytest.raises(WorkerError, match=r"step-12-0 is done but cannot be written to .*step-000012/.*\.groups: "):
        append(journal(tmp_path), job())


def test_full_disk_keeps_earlier_groups(tmp_path, monkeypatch):
    writer = journal(tmp_path)
    append(writer, job(0))
    write = os.write

    def full(descriptor, data):
        write(descriptor, data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(WorkerError, match="No space left on device"):
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
    same = [
        {"run_dir": "runs/b"},
        {"trainer": {"steps": 7}},
        {"checkpoint": {"every": 3}},
        {"rollout": {"workers": 2}},
        {"tracking": {"rollouts": False}},
    ]
    assert {config(**changes) for changes in same} == {base}
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
        {"algorithm": {"type": "grpo", "group_size": 3}},
        {"reward": {"terms": {"accuracy": {"type": "numeric", "weight": 2.0}}}},
    ]
    assert len({base, *(config(**changes) for changes in other)}) == len(other) + 1


def test_fingerprint_does_not_depend_on_how_a_service_is_called():
    def service(**fields):
        return config(reward={"terms": {"tests": {"type": "http", "url": "http://a", **fields}}})

    same = [{"url": "http://b"}, {"max_retries": 1}, {"breaker": {"failures": 1}}, {"max_batch_size": 1}]
    assert {service(**fields) for fields in same} == {service()}
    assert service(weight=2.0) != service() != service(on_error="raise")
    assert config(reward={"max_failed_share": 0.5}) == config()


def test_appended_groups_survive_a_killed_process(tmp_path):
    for incarnation in range(3):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                writer = journal(tmp_path)
                for group in range(incarnation * 10_000, 10**6):
                    append(writer, job(group))
                    os.write(write_end, group.to_bytes(4, "little"))
            finally:
                os._exit(1)
        os.close(write_end)
        data = b""
        while len(data) < 4 * (20 + 7 * incarnation):
            data += os.read(read_end, 4)
            assert data, "the process has ended"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(read_end, 65536):
            data += more
        os.close(read_end)
        groups = np.frombuffer(data, np.uint32).tolist()
        found = journal(tmp_path).lookup(STEP, [job(group) for group in groups])
        assert [as_bits(g) for g in found] == [as_bits(finished_group(job(group))) for group in groups]
    assert len(read_step(tmp_path, STEP)) >= 3
