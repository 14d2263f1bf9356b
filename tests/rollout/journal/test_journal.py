import logging
import os
import signal
import time
from dataclasses import fields, replace

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config import RunConfig
from megarl.errors import WorkerError
from megarl.rollout.engine import Sampling
from megarl.rollout.journal.journal import Journal, fingerprint_of, read_step, step_of
from megarl.rollout.journal.journal_folder import discard_after, drop_steps, fingerprints_in, set_aside, steps_in
from megarl.rollout.journal.record_file import scan
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize

STEP = 12
ARRAYS = ("token_ids", "loss_mask", "logprobs", "policy_versions")


def job(group=0, prompt_id=None, num_samples=3, label=f"step-{STEP}"):
    return GroupJob(
        prompt=Prompt(prompt_id=prompt_id or f"train.jsonl:{group + 1}", text="", token_ids=(5, 6, 7), row={}),
        group_id=group,
        num_samples=num_samples,
        sampling=Sampling(temperature=1.0, max_new_tokens=64),
        seed=(0, STEP),
        request_id=f"{label}-{group}",
    )


def trajectory(asked, rng, sampled):
    n = 3 + sampled
    logprobs = rng.standard_normal(n).astype(np.float32)
    logprobs[:3] = [0.0, -0.0, np.nextafter(np.float32(0), np.float32(1))]
    return Trajectory(
        prompt_id=asked.prompt.prompt_id,
        group_id=asked.group_id,
        token_ids=rng.integers(0, 2**31, n).astype(np.int32),
        loss_mask=np.repeat([False, True], [3, sampled]),
        logprobs=logprobs,
        policy_versions=np.repeat(np.array([-1, 11], np.int32), [3, sampled]),
        rewards={"zeta": float(rng.standard_normal()), "accuracy": 0.1 + 0.2},
        reward=float(rng.standard_normal()),
        finish_reason="length" if sampled else "stop",
    )


def finished(asked, seed=0):
    """The third sample is an empty completion."""
    rng = np.random.default_rng((seed, asked.group_id))
    found = [trajectory(asked, rng, sampled) for sampled in (17, 1, 0, 40)[: asked.num_samples]]
    summary = GroupSummary(
        group_id=asked.group_id,
        prompt_id=asked.prompt.prompt_id,
        trajectories=tuple(summarize(t) for t in found),
        generation_seconds=0.1 + seed,
        scoring_seconds=1 / 3,
    )
    return summary, found


def journal(folder, fingerprint="ours"):
    return Journal(folder, fingerprint)


def bits(group):
    summary, found = (group.summary, group.trajectories) if hasattr(group, "summary") else group
    plain = [f.name for f in fields(Trajectory) if f.name not in ARRAYS]
    return summary, [
        [getattr(t, name) for name in plain]
        + [list(t.rewards)]
        + [(getattr(t, name).dtype, getattr(t, name).tobytes()) for name in ARRAYS]
        for t in found
    ]


def filled(folder, count=3):
    writer = journal(folder)
    for group in range(count):
        writer.keep(STEP, job(group), *finished(job(group)))
    (path,) = (folder / "journal" / "step-000012").iterdir()
    return path


def test_a_group_comes_back_bit_for_bit_in_another_process_s_hands(tmp_path):
    kept = [journal(tmp_path).keep(STEP, job(g), *finished(job(g))) for g in range(3)]
    found = journal(tmp_path).find(STEP, [job(2), job(3), job(0)])
    assert found[1] is None
    assert bits(found[0]) == bits(kept[2]) == bits(finished(job(2)))
    assert bits(found[2]) == bits(finished(job(0)))
    assert found[0].trajectories[0].token_ids.flags.writeable
    assert {g.request_id: bits(g) for g in read_step(tmp_path, STEP)} == {
        f"step-12-{g}": bits(finished(job(g))) for g in range(3)
    }


def test_a_writer_s_own_groups_and_those_of_others_are_seen_while_the_step_goes_on(tmp_path):
    ours, theirs = journal(tmp_path), journal(tmp_path)
    assert ours.find(STEP, [job(0), job(1)]) == [None, None]
    ours.keep(STEP, job(0), *finished(job(0)))
    theirs.keep(STEP, job(1), *finished(job(1)))
    assert None not in ours.find(STEP, [job(0), job(1)])
    assert None not in theirs.find(STEP, [job(0), job(1)])
    assert ours.find(STEP + 1, [job(0)]) == [None]


def test_what_a_killed_writer_left_unfinished_costs_the_last_group_alone(tmp_path):
    path = filled(tmp_path)
    whole = path.read_bytes()
    frames, end = scan(path)
    assert end == len(whole)
    before = frames[-2].start + frames[-2].length
    for cut in range(before, len(whole), 7):
        path.write_bytes(whole[:cut])
        found = journal(tmp_path).find(STEP, [job(g) for g in range(3)])
        assert [g is not None for g in found] == [True, True, False], cut
        assert bits(found[1]) == bits(finished(job(1)))
    for cut in range(0, frames[0].start, 5):
        path.write_bytes(whole[:cut])
        assert journal(tmp_path).find(STEP, [job(0)]) == [None]


def test_an_unfinished_group_is_read_once_it_is_whole(tmp_path):
    path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    reader = journal(tmp_path)
    assert reader.find(STEP, [job(2)]) == [None]
    path.write_bytes(whole)
    assert bits(reader.find(STEP, [job(2)])[0]) == bits(finished(job(2)))


@pytest.mark.parametrize("part", ["body", "header", "meta", "beginning"])
def test_damage_is_told_and_its_group_generated_again(tmp_path, caplog, part):
    path = filled(tmp_path)
    frames, _ = scan(path)
    end = frames[1].start + frames[1].length  # of group 0
    where = {"body": frames[2].start + 100, "header": end + 5, "meta": frames[2].start - 3, "beginning": 30}[part]
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = [g is not None for g in journal(tmp_path).find(STEP, [job(g) for g in range(3)])]
    survive = {"body": [1, 0, 1], "meta": [1, 0, 1], "header": [1, 0, 0], "beginning": [0, 0, 0]}[part]
    assert found == [bool(s) for s in survive]
    assert str(path) in caplog.text
    writer = journal(tmp_path)
    writer.keep(STEP, job(1), *finished(job(1), seed=5))
    assert bits(journal(tmp_path).find(STEP, [job(1)])[0]) == bits(finished(job(1), seed=5))


def test_a_late_answer_is_dropped_for_the_first(tmp_path):
    first, late = journal(tmp_path), journal(tmp_path)
    assert late.find(STEP, [job()]) == [None]
    first.keep(STEP, job(), *finished(job(), seed=1))
    assert bits(late.keep(STEP, job(), *finished(job(), seed=2))) == bits(finished(job(), seed=1))
    assert len(list((tmp_path / "journal" / "step-000012").iterdir())) == 1


def test_every_reader_takes_the_same_of_two_answers(tmp_path):
    """The first by the files' names, whichever was seen first."""
    folder = tmp_path / "run" / "journal" / "step-000012"
    folder.mkdir(parents=True)
    early = journal(tmp_path / "run")
    for name, seed in (("z", 1), ("a", 0)):
        journal(tmp_path / name).keep(STEP, job(), *finished(job(), seed=seed))
        (path,) = (tmp_path / name / "journal" / "step-000012").iterdir()
        path.rename(folder / f"{name}.groups")
        assert bits(early.find(STEP, [job()])[0]) == bits(finished(job(), seed=seed))
    for late in (journal(tmp_path / "run").find(STEP, [job()]), read_step(tmp_path / "run", STEP)):
        assert [bits(g) for g in late] == [bits(finished(job(), seed=0))]


@pytest.mark.parametrize(
    "other", [job(prompt_id="train.jsonl:9"), job(num_samples=2), replace(job(), seed=(1, STEP))], ids=str
)
def test_another_job_under_the_same_name_is_told_and_generated_again(tmp_path, caplog, other):
    filled(tmp_path, count=1)
    again = journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert again.find(STEP, [other]) == [None]
    assert "step-12-0: the journal has another job under this name (prompt train.jsonl:1" in caplog.text
    again.keep(STEP, other, *finished(other))
    assert bits(journal(tmp_path).find(STEP, [other])[0]) == bits(finished(other))
    assert bits(journal(tmp_path).find(STEP, [job()])[0]) == bits(finished(job()))


def test_another_run_s_journal_is_not_used(tmp_path):
    path = filled(tmp_path)
    other = journal(tmp_path, "theirs")
    for _ in range(2):
        with pytest.raises(WorkerError, match=rf"\(theirs\), got {path} of another one \(ours\); move .*journal away"):
            other.find(STEP, [job()])
    assert fingerprints_in(tmp_path) == {"ours"}
    assert set_aside(tmp_path).name == "journal-aside-1"
    assert other.find(STEP, [job()]) == [None]
    assert fingerprints_in(tmp_path) == set()
    filled(tmp_path)
    assert set_aside(tmp_path).name == "journal-aside-2"


def test_a_group_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "journal").write_text("a file in its place")
    with pytest.raises(WorkerError, match=r"step-12-0 is done and cannot be written to .*step-000012/.*\.groups: "):
        journal(tmp_path).keep(STEP, job(), *finished(job()))


def test_a_full_disk_leaves_what_was_written_before(tmp_path, monkeypatch):
    writer = journal(tmp_path)
    writer.keep(STEP, job(0), *finished(job(0)))
    write = os.write

    def full(descriptor, data):
        write(descriptor, data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(WorkerError, match="No space left on device"):
        writer.keep(STEP, job(1), *finished(job(1)))
    monkeypatch.setattr(os, "write", write)
    writer.keep(STEP, job(2), *finished(job(2)))
    assert [g is not None for g in journal(tmp_path).find(STEP, [job(g) for g in range(3)])] == [True, False, True]


def test_steps_are_dropped_and_discarded(tmp_path):
    assert steps_in(tmp_path) == []
    drop_steps(tmp_path, upto=3)
    writer = journal(tmp_path)
    for step in (0, 2, 9, 10, 11):
        writer.keep(step, job(), *finished(job()))
    (tmp_path / "journal" / "step-000009.kept").mkdir()
    assert steps_in(tmp_path) == [0, 2, 9, 10, 11]
    drop_steps(tmp_path, upto=2)
    assert steps_in(tmp_path) == [9, 10, 11]
    discard_after(tmp_path, 9)
    assert steps_in(tmp_path) == [9]
    assert len(read_step(tmp_path, 9)) == 1
    assert read_step(tmp_path, 10) == []
    assert writer.find(10, [job()]) == [None]


def test_what_cannot_be_dropped_yet_is_dropped_the_next_time(tmp_path, monkeypatch):
    """On NFS a file that some process has open gets another name instead, and its folder stays."""
    writer = journal(tmp_path)
    for step in (1, 2, 3):
        writer.keep(step, job(), *finished(job()))
    rmdir = os.rmdir

    def busy(path, **given):
        if str(path).endswith("step-000002"):
            raise OSError(39, "Directory not empty")
        rmdir(path, **given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        drop_steps(tmp_path, upto=2)
        assert steps_in(tmp_path) == [2, 3]
        with pytest.raises(OSError, match="Directory not empty"):
            discard_after(tmp_path, 1)  # what is left would be replayed
    drop_steps(tmp_path, upto=2)
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize(
    ("request_id", "step"),
    [
        ("step-12-3", 12),
        ("step-12-1-3", 12),
        ("step-12-greedy-3", 12),
        ("step-12-1-greedy-3", 12),
        ("evaluate-10-3", 10),
        ("evaluate-3", None),
        ("1-3", None),
    ],
)
def test_a_request_s_name_says_its_step(request_id, step):
    assert step_of(request_id) == step


def config(**changes):
    sections = {"run_dir": "runs/a", "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    return fingerprint_of(RunConfig.model_validate(sections | changes))


def test_the_fingerprint_is_of_what_decides_the_samples():
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
        {"trainer": {"optimizer": {"lr": 1.0}}},
        {"trainer": {"optimizer": {"decay": "linear"}}},
        {"trainer": {"optimizer": {"decay": "linear"}, "steps": 7}},
        {"algorithm": {"type": "grpo", "group_size": 3}},
        {"reward": {"terms": {"accuracy": {"type": "numeric", "weight": 2.0}}}},
    ]
    assert len({base, *(config(**changes) for changes in other)}) == len(other) + 1


def test_what_was_kept_outlives_a_killed_process(tmp_path):
    for incarnation in range(3):
        said, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                writer = journal(tmp_path)
                for group in range(incarnation * 10_000, 10**6):
                    writer.keep(STEP, job(group), *finished(job(group)))
                    os.write(say, group.to_bytes(4, "little"))
            finally:
                os._exit(1)
        told = os.read(said, 4 * 20)
        time.sleep(0.02 + 0.003 * incarnation)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(say)
        while more := os.read(said, 65536):
            told += more
        os.close(said)
        groups = np.frombuffer(told, np.uint32).tolist()
        found = journal(tmp_path).find(STEP, [job(group) for group in groups])
        assert [bits(g) for g in found] == [bits(finished(job(group))) for group in groups]
    assert len(read_step(tmp_path, STEP)) >= 3
