"""Runs with episodes of several turns: an environment, a program behind the gateway, and an agent.

Agent, algorithm and group reward are those of the examples, which are outside the package.
"""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from transformers import PreTrainedTokenizerBase

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig, load_config
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.journal import list_steps as journal_steps
from megarl.rollout.journal import read_step
from megarl.run.remote.rollout_workers import RolloutWorkers
from tests.end_to_end.components import Components, make_config
from tests.end_to_end.launched import MISMATCH, list_steps
from tests.end_to_end.talking_environment import HINT
from tests.end_to_end.tiny_world import PATIENCE

TURN_TOKENS = 6
EXAMPLES = Path(__file__).parents[2] / "examples"
ALGORITHM, AGENT, REWARD = (EXAMPLES / f"custom-{name}" for name in ("algorithm", "agent", "reward"))
AGENT_HINT = "Once more: "

FLAKY = """
from pathlib import Path
from reward import ShortestAnswer

class Flaky(ShortestAnswer):
    def __init__(self, log, **kwargs):
        super().__init__(**kwargs)
        self.log = Path(log)

    def score(self, trajectories, texts, row):
        results = super().score(trajectories, texts, row)
        return [result | {"reward": len(text)} if i else None for i, (result, text) in enumerate(zip(results, texts))]

    def close(self):
        self.log.write_text("closed")
"""
"""A reward of the number of characters, which fails on the first completion of each group."""


def train(
    components: Components, world: Path, run_dir: Path, rollout: dict[str, Any], *, num_prompts: int, **sections: Any
) -> list[Any]:
    """Train a model with a chat template by GRPO with groups of four; return the metrics of each step."""
    config = make_config(
        world,
        run_dir,
        model={"path": str(world / "chat")},
        algorithm={"type": "grpo", "kl_loss": None, "group_size": 4, "prompts_per_step": num_prompts},
        rollout={"max_new_tokens": 90} | rollout,
        checkpoint={"every": 0, "keep_journal": "all"},
        **sections,
    )
    components.run(config)
    steps = list_steps(run_dir)
    assert all(row[MISMATCH] <= 1e-4 for row in steps)
    return steps


def read_trajectories(run_dir: Path) -> list[Trajectory]:
    """Return all trajectories of the journal, those of evaluations included."""
    entries = (entry for step in journal_steps(run_dir) for entry in read_step(run_dir, step))
    return [trajectory for entry in entries for trajectory in entry.trajectories]


def test_turns_of_an_asynchronous_run_are_trained_on_with_their_own_versions(components, world, tmp_path):
    """Weights are pushed between and within turns."""
    talking = {
        "path": "tests.end_to_end.talking_environment:Talking",
        "max_turn_tokens": TURN_TOKENS,
        "max_seconds": PATIENCE,
        "kwargs": {"metrics": str(tmp_path / "run/metrics.jsonl"), "pause": 4},  # the first that is sampled ahead
    }
    steps = train(
        components,
        world,
        tmp_path / "run",
        {"env": talking},
        num_prompts=4,
        data={"path": str(world / "data/train.jsonl")},
        trainer={"steps": 5},
        reward={"terms": {"ones": {"type": "environment"}}, "max_failed_share": 0.9},
        schedule={"type": "async", "lookahead": 1, "max_staleness": 2},
    )
    assert max(row["staleness/max"] for row in steps) in (1, 2)
    assert all(row["rollout/turns"] > 1 and row["rollout/forked_segments"] == 0 for row in steps)
    tokenizer, num_failed, num_versions = load_tokenizer(world / "chat"), 0, set()
    trajectories = read_trajectories(tmp_path / "run")
    assert len(trajectories) >= 5 * 4 * 4
    for trajectory in trajectories:
        if trajectory.reward_errors:
            assert "environment" in trajectory.reward_errors
            num_failed += 1
            continue
        mask, versions = trajectory.loss_mask, trajectory.policy_versions
        assert np.array_equal(versions >= 0, mask)
        assert np.all(np.diff(versions[mask]) >= 0)
        num_versions.add(len(set(versions[mask])))
        turns = [(is_sampled, len(list(tokens))) for is_sampled, tokens in groupby(mask)]
        assert all(count <= TURN_TOKENS for is_sampled, count in turns if is_sampled)
        text = tokenizer.decode(trajectory.token_ids[~mask])
        assert text.count(HINT) == sum(is_sampled for is_sampled, _ in turns) - 1
    assert num_failed < len(trajectories) / 4  # both attempts of an episode need to fail
    assert max(num_versions) > 1


def test_a_program_is_trained_through_the_gateway(components, world, tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("two_turns.py"))]
    harness = {"command": command, "max_turn_tokens": 12, "max_programs": 4, "max_seconds": PATIENCE}
    sections = {
        "trainer": {"steps": 2},
        "reward": {"terms": {"ones": {"type": "environment"}}},
        "data": {"path": str(world / "data/train.jsonl")},
    }
    steps = train(components, world, tmp_path / "run", {"harness": harness}, num_prompts=2, **sections)
    assert all(row["rollout/turns"] == 2 for row in steps)
    trajectories = read_trajectories(tmp_path / "run")
    assert len(trajectories) == 2 * 2 * 4
    assert not any(trajectory.reward_errors for trajectory in trajectories)


def import_in_workers(components: Components, folders: list[str], patch: pytest.MonkeyPatch) -> None:
    """Let trainer ranks and the rollout workers that start from now on import modules in these folders."""

    def extend_path() -> None:
        sys.path.extend(folders)

    def launch(workers: RolloutWorkers, index: int) -> Any:
        actor = launch_worker(workers, index)
        ray.get(actor.run.remote(extend_path))
        return actor

    launch_worker = RolloutWorkers.launch
    patch.setattr(RolloutWorkers, "launch", launch)
    components.processes.begin_run(extend_path).result()
    for folder in folders:
        patch.syspath_prepend(folder)


def test_algorithm_agent_and_reward_of_the_examples_train_together(components, world, tmp_path, monkeypatch):
    (tmp_path / "flaky.py").write_text(FLAKY)
    import_in_workers(components, [str(folder) for folder in (tmp_path, ALGORITHM, AGENT, REWARD)], monkeypatch)
    changes = {
        "run_dir": tmp_path / "run",
        "model.path": world / "model",
        "data.path": world / "data/train.jsonl",
        "data.eval_path": "null",
        "data.overlong_prompts": "drop",
        "algorithm.group_size": 3,
        "algorithm.prompts_per_step": 4,
        "trainer.steps": 2,
        "rollout.max_new_tokens": 90,
        "rollout.agent.path": "agent:run",
        "rollout.agent.kwargs.tokens_per_turn": TURN_TOKENS,
        "rollout.agent.kwargs.hint": f"'{AGENT_HINT}'",
        "reward.max_failed_share": 1,
        "reward.terms": "{shortest: {type: python, path: flaky:Flaky, per: group, on_error: drop}}",
        "reward.terms.shortest.kwargs": f"{{bonus: 0.2, log: {tmp_path / 'closed.txt'}}}",
        "reward.terms.shortest.timeout_seconds": PATIENCE,
        "rollout.request_timeout_seconds": PATIENCE,
        "placement.slots_per_node": 2,
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    components.run(load_config(RunConfig, ALGORITHM / "demo.yaml", overrides))
    assert (tmp_path / "closed.txt").read_text() == "closed"

    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1]
    assert all(row["grad_norm"] > 0 for row in steps)
    # the trainer computes the log-probabilities of the second turn after the same observation as the engine
    assert max(row[MISMATCH] for row in steps) <= 1e-4
    tokenizer = load_tokenizer(world / "model")
    for row, log in zip(steps, sorted((tmp_path / "run/rollouts").iterdir()), strict=True):
        rollouts = pq.read_table(log).to_pylist()
        assert len(rollouts) == 12
        for rollout in rollouts:
            check_turns(rollout, tokenizer)
        check_dropped(row, rollouts)


def check_turns(rollout: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that both turns were sampled, and that the text between them is not trained on."""
    mask = np.array(rollout["loss_mask"])
    starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1) + 1
    assert len(starts) == len(ends) == 2
    assert all(0 < end - start <= TURN_TOKENS for start, end in zip(starts, ends, strict=True))
    assert tokenizer.decode(rollout["token_ids"][ends[0] : starts[1]]) == f"\n{AGENT_HINT}{rollout['prompt']}"
    assert np.all(np.array(rollout["logprobs"])[~mask] == 0)
    assert ends[1] == rollout["num_tokens"]


def check_dropped(row: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
    """Check that completions whose reward failed are neither trained on nor averaged."""
    assert (row["reward/dropped"], row["reward/shortest/failed"]) == (4, 4)
    dropped, kept = ([each for each in rollouts if bool(each["reward_errors"]) == failed] for failed in (True, False))
    assert [(each["reward"], each["advantage"]) for each in dropped] == [(None, None)] * 4
    assert "returned NoneType None, not a number, on train.jsonl:" in dict(dropped[0]["reward_errors"])["shortest"]
    lengths = [dict(each["rewards"])["shortest/characters"] for each in kept]
    assert row["reward/shortest/characters"] == pytest.approx(sum(lengths) / 8)
    assert row["reward/mean"] == row["reward/shortest"] == pytest.approx(sum(lengths) / 8)
    assert [each["reward"] for each in kept] == lengths
    for group in range(4):
        advantages = [each["advantage"] for each in kept if each["group_id"] == group]
        assert len(advantages) == 2
        assert sum(advantages) == pytest.approx(0, abs=1e-5)  # the median of two rewards is their mean


def test_the_example_prefers_the_shortest_correct_answer(monkeypatch):
    monkeypatch.syspath_prepend(REWARD)
    from reward import ShortestAnswer

    texts = ["8+3=11 #### 11", "#### 11", "#### 12"]
    scored = ShortestAnswer(bonus=0.5).score([], texts, {"answer": "11"})
    assert [result["reward"] for result in scored] == [1.0, 1.5, 0.0]
    assert [result["characters"] for result in scored] == [14, 7, 7]
