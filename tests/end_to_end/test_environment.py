"""`megarl train` with an environment of several turns, while weights are pushed between and within turns."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np

from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.journal.journal import read_step
from megarl.rollout.journal.journal_folder import list_steps as journal_steps
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps
from tests.end_to_end.talking_environment import HINT
from tests.end_to_end.tiny_world import write_run

TURN_TOKENS = 6


def test_turns_of_an_asynchronous_run_are_trained_on_with_their_own_versions(
    world: Path, tmp_path: Path, launch: Launch
) -> None:
    model = {
        "path": str(tmp_path / "model"),
        "tiny": {"hidden_size": 64, "num_layers": 2, "context_length": 160, "chat": True},
    }
    path = "tests.end_to_end.talking_environment:Talking"
    config = write_run(
        world,
        tmp_path,
        model=model,
        algorithm={"type": "grpo", "kl_loss": None, "group_size": 4, "prompts_per_step": 4},
        trainer={"steps": 5, "optimizer": {"lr": 1e-3}},
        rollout={"max_new_tokens": 90, "env": {"path": path, "max_turn_tokens": TURN_TOKENS}},
        reward={"terms": {"ones": {"type": "environment"}}, "max_failed_share": 0.9},
        schedule={"type": "async", "lookahead": 1, "max_staleness": 2},
        placement={"slots_per_node": 1},
        checkpoint={"every": 0},
    )
    run = launch("train", config)
    assert run.wait() == 0, run.stderr
    run.assert_no_processes_left()
    steps = list_steps(tmp_path / "run")
    assert max(row["staleness/max"] for row in steps) in (1, 2)
    assert all(row["train_infer_mismatch/logprob_abs_max"] <= 1e-4 for row in steps)
    assert all(row["rollout/turns"] > 1 for row in steps)
    assert all(row["rollout/forked_segments"] == 0 for row in steps)

    tokenizer, num_failed, num_versions = load_tokenizer(tmp_path / "model"), 0, set()
    trajectories = [
        trajectory
        for step in journal_steps(tmp_path / "run")
        for entry in read_step(tmp_path / "run", step)
        for trajectory in entry.trajectories
    ]
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
