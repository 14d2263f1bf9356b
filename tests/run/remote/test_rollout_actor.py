"""The rollout actor's journal: replay after a restart, and batching of engine calls."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt, ScoredGroup, TermReport
from megarl.checkpoint.run_lock import RunLock, find_claim
from megarl.config import RunConfig
from megarl.engines.engine import Generation, Sampling
from megarl.errors import LostLockError, WorkerError
from megarl.rollout.journal import read_step
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.remote import rollout_actor
from tests.checkpoint.run_folder import take_over
from tests.rollout.whole_batches import WholeBatches


class SeededEngine(WholeBatches):
    """Fake engine whose completions depend only on the seed; requests with prompts in `broken` fail."""

    def __init__(self, broken=()):
        self.broken, self.requested_seeds, self.calls = broken, {}, 0

    async def generate_many(self, requests):
        self.calls += 1
        self.requested_seeds |= {r.request_id: r.sampling.seed for r in requests}
        await asyncio.sleep(0)
        if any(r.token_ids[-1] in self.broken for r in requests):
            raise WorkerError("the engine was killed")
        return [self._generation(r.sampling.seed) for r in requests]

    def _generation(self, seed):
        rng = np.random.default_rng(seed)
        k = int(rng.integers(0, 9))
        return Generation(
            token_ids=rng.integers(0, 99, k).astype(np.int32),
            logprobs=-rng.random(k).astype(np.float32),
            policy_versions=np.full(k, 4, np.int32),
            finish_reason="stop",
        )


class Scorer:
    async def score(self, trajectories, prompt):
        lengths = [(t, float(t.loss_mask.sum())) for t in trajectories]
        scored = [replace(t, rewards={"length": length / 3}) for t, length in lengths]
        return ScoredGroup(trajectories=scored, terms={"length": TermReport(seconds=0.5, num_retried=1)})


@pytest.fixture
def make_actor(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_actor.RewardScorer, "from_tokenizer", lambda *_: Scorer())
    monkeypatch.setattr(rollout_actor, "load_tokenizer", lambda *_, **__: SimpleNamespace(decode=str))

    def start(engine, claim=None, **changes):
        sections = {"run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
        return rollout_actor.RolloutActor(RunConfig.model_validate(sections | changes), [engine], claim)

    return start


def job(group, label="step-5", seed=(0, 5)):
    return GroupJob(
        prompt=Prompt(prompt_id=f"d.jsonl:{group}", text="", token_ids=(1, 2, 100 + group), row={}),
        group_id=group,
        num_samples=4,
        sampling=Sampling(temperature=1.0, max_new_tokens=9),
        seed=seed,
        request_id=f"{label}-{group}",
    )


def run(make_actor, jobs):
    async def main():
        return await asyncio.gather(*map(make_actor.rollout_group, jobs), return_exceptions=True)

    return asyncio.run(main())


def comparable(answer):
    summary, trajectories = answer
    return replace(summary, replayed=False), [
        (t.token_ids.tolist(), t.loss_mask.tolist(), t.logprobs.tobytes(), t.policy_versions.tolist(), t.rewards)
        for t in trajectories
    ]


def replayed(answers):
    """Return for each answer whether it comes from the journal."""
    return [not isinstance(answer, WorkerError) and answer[0].replayed for answer in answers]


def test_restarted_actor_regenerates_only_unfinished_groups(make_actor, tmp_path):
    undisturbed, jobs = SeededEngine(), [job(g) for g in range(4)]
    expected = run(make_actor(undisturbed, run_dir=str(tmp_path / "undisturbed")), jobs)
    assert (undisturbed.calls, len(undisturbed.requested_seeds)) == (1, 16), "concurrent groups take one call"

    first = make_actor(SeededEngine(broken=[102]))
    answers = [run(first, [each])[0] for each in jobs]  # one engine call per job; the call of job 2 fails
    assert [isinstance(a, WorkerError) for a in answers] == [False, False, True, False]
    assert not any(replayed(answers))

    engine = SeededEngine()
    again = run(make_actor(engine), jobs)
    assert engine.requested_seeds == {f"step-5-2-{s}": undisturbed.requested_seeds[f"step-5-2-{s}"] for s in range(4)}
    assert replayed(again) == [True, True, False, True]
    assert [comparable(again[g]) for g in (0, 1, 3)] == [comparable(answers[g]) for g in (0, 1, 3)]
    assert [comparable(a)[1] for a in again] == [comparable(a)[1] for a in expected]

    idle = SeededEngine()
    assert [comparable(a) for a in run(make_actor(idle), jobs)] == [comparable(a) for a in again]
    assert idle.calls == 0


def test_evaluation_of_a_step_is_journaled_and_without_a_step_is_not(make_actor, tmp_path):
    jobs, engine = [job(1, label=label, seed=()) for label in ("evaluate-5", "evaluate")], SeededEngine()
    run(make_actor(SeededEngine()), jobs)
    assert [group.request_id for group in read_step(tmp_path, 5)] == ["evaluate-5-1"]
    run(make_actor(engine), jobs)
    assert list(engine.requested_seeds) == [f"evaluate-1-{s}" for s in range(4)]


def test_journal_entry_of_another_prompt_is_not_replayed(make_actor):
    run(make_actor(SeededEngine()), [job(1)])
    engine = SeededEngine()
    (answer,) = run(make_actor(engine), [replace(job(1), prompt=job(2).prompt)])
    assert len(engine.requested_seeds) == 4
    assert comparable(answer)[0].prompt_id == "d.jsonl:2"


async def first_tokens(episode, *, count=1):
    await episode.generate(max_new_tokens=count)
    return episode.trajectory()


AGENT = f"{__name__}:first_tokens"


def agent(**kwargs):
    return {"rollout": {"agent": {"path": AGENT, "kwargs": kwargs}}}


@pytest.mark.parametrize(
    ("before", "changes"), [({}, {"seed": 3}), ({}, agent()), (agent(count=3), agent(count=2))], ids=str
)
def test_journal_of_another_configuration_fails_every_group(make_actor, before, changes):
    run(make_actor(SeededEngine(), **before), [job(1)])
    engine = SeededEngine()
    answers = run(make_actor(engine, **changes), [job(g) for g in range(3)])
    assert all(isinstance(a, WorkerError) and "move" in str(a) for a in answers)
    assert engine.calls == 0


def test_an_actor_of_a_run_that_lost_its_folder_writes_nothing(make_actor, tmp_path):
    with RunLock(tmp_path):
        claim = find_claim(tmp_path)
        actor = make_actor(SeededEngine(), claim)
        ((_, trajectories),) = run(actor, [job(0)])
        take_over(tmp_path)
        written = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
        assert isinstance(run(actor, [job(1)])[0], LostLockError)
        rewards = tuple([getattr(t, name) for t in trajectories] for name in ("reward", "rewards", "reward_errors"))
        with pytest.raises(LostLockError):
            asyncio.run(actor.record(5, rewards, [0.0] * len(trajectories), [(0, 0)], [trajectories]))
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == written
