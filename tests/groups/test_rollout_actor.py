import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.errors import WorkerError
from megarl.groups import rollout_actor
from megarl.rollout.engine import Generation, Sampling
from megarl.rollout.journal.journal import read_step
from megarl.rollout.rollout_worker import GroupJob


class SeededEngine:
    """Completions follow from the seeds; requests of prompts in `broken` fail."""

    def __init__(self, broken=()):
        self.broken = broken
        self.asked = {}
        self.calls = 0

    async def generate_many(self, requests):
        self.calls += 1
        for r in requests:
            self.asked[r.request_id] = r.sampling.seed
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
    async def score(self, trajectory, prompt):
        length = float(trajectory.loss_mask.sum())
        return {"length": length}, length / 3


@pytest.fixture
def process(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_actor.RewardScorer, "from_model", lambda *_: Scorer())
    monkeypatch.setattr(rollout_actor, "load_tokenizer", lambda _: SimpleNamespace(decode=str))

    def start(engine, **changes):
        sections = {"run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
        return rollout_actor.RolloutActor(RunConfig.model_validate(sections | changes), [engine])

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


def run(process, jobs):
    async def main():
        return await asyncio.gather(*map(process.rollout_group, jobs), return_exceptions=True)

    return asyncio.run(main())


def plain(answer):
    summary, trajectories = answer
    return replace(summary, replayed=False), [
        (t.token_ids.tolist(), t.loss_mask.tolist(), t.logprobs.tobytes(), t.policy_versions.tolist(), t.rewards)
        for t in trajectories
    ]


def replayed(answers):
    """By answer, whether it is from the journal."""
    return [not isinstance(answer, WorkerError) and answer[0].replayed for answer in answers]


def test_a_second_incarnation_asks_for_nothing_that_had_finished(process, tmp_path):
    undisturbed = SeededEngine()
    expected = run(process(undisturbed, run_dir=str(tmp_path / "undisturbed")), [job(g) for g in range(4)])

    first = process(SeededEngine(broken=[102]))
    answers = [run(first, [job(g)])[0] for g in range(4)]  # one engine call each, of which one fails
    assert [isinstance(a, WorkerError) for a in answers] == [False, False, True, False]
    assert not any(replayed(answers))

    engine = SeededEngine()
    second = process(engine)
    again = run(second, [job(g) for g in range(4)])
    assert engine.asked == {f"step-5-2-{s}": undisturbed.asked[f"step-5-2-{s}"] for s in range(4)}
    assert replayed(again) == [True, True, False, True]
    assert [plain(again[g]) for g in (0, 1, 3)] == [plain(answers[g]) for g in (0, 1, 3)]
    assert [plain(a)[1] for a in again] == [plain(a)[1] for a in expected]

    idle = SeededEngine()
    assert [plain(a) for a in run(process(idle), [job(g) for g in range(4)])] == [plain(a) for a in again]
    assert idle.calls == 0


def test_evaluations_belong_to_a_step_and_scores_without_a_run_to_none(process, tmp_path):
    first = process(SeededEngine())
    run(first, [job(1, label="evaluate-5", seed=()), job(1, label="evaluate", seed=())])
    assert [group.request_id for group in read_step(tmp_path, 5)] == ["evaluate-5-1"]
    engine = SeededEngine()
    run(process(engine), [job(1, label="evaluate-5", seed=()), job(1, label="evaluate", seed=())])
    assert list(engine.asked) == [f"evaluate-1-{s}" for s in range(4)]


def test_another_prompt_under_the_same_name_is_asked_for(process):
    run(process(SeededEngine()), [job(1)])
    engine = SeededEngine()
    other = replace(job(1), prompt=job(2).prompt)
    (answer,) = run(process(engine), [other])
    assert len(engine.asked) == 4
    assert plain(answer)[0].prompt_id == "d.jsonl:2"


def test_another_configuration_s_journal_is_an_error_of_every_group(process):
    run(process(SeededEngine()), [job(1)])
    engine = SeededEngine()
    answers = run(process(engine, seed=3), [job(g) for g in range(3)])
    assert all(isinstance(a, WorkerError) and "move" in str(a) for a in answers)
    assert engine.calls == 0


def test_groups_that_are_asked_for_together_still_travel_together(process):
    engine = SeededEngine()
    run(process(engine), [job(g) for g in range(16)])
    assert engine.calls == 1
    assert len(engine.asked) == 64
