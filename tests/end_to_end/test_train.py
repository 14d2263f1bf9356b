"""A run of `megarl train`: everything that it writes to the run folder."""

import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import FinishedRun
from tests.end_to_end.launched import COMPARED_METRICS, list_steps
from tests.end_to_end.test_disaggregated import DISAGGREGATED
from tests.end_to_end.tiny_world import NUM_HELD_OUT, STEPS, write_run

GROUPS, SAMPLES = 4, 2


@pytest.fixture
def run(undisturbed: FinishedRun) -> FinishedRun:
    return undisturbed


def test_run_succeeds_and_leaves_no_processes_or_temporary_files(run):
    assert run.exit_code == 0, run.command.stderr
    assert run.command.stderr == ""
    assert run.leftovers == []
    assert f"step {STEPS}/{STEPS}" in run.command.stdout
    assert f"steps: {STEPS}" in (run.folder / "train.yaml").read_text()
    beat = json.loads((run.folder / "heartbeat.json").read_text())
    assert (beat["status"], beat["step"], beat["last_checkpoint_step"]) == ("ended", STEPS, STEPS)


def test_summary_matches_the_metrics(run, world):
    summary = run.summary()
    assert summary["steps"] == STEPS
    assert 0.0 <= summary["eval_before"] <= 1.0
    assert summary["eval_after"] in [i / NUM_HELD_OUT for i in range(NUM_HELD_OUT + 1)]
    phases = summary["seconds_by_phase"]
    assert {"start", "weight_sync", "rollout", "train", "evaluate", "export"} <= phases.keys()
    assert summary["seconds_total"] / 2 < sum(phases.values()) <= summary["seconds_total"]
    model_bytes = sum(t.nbytes for t in load_file(world / "model" / "model.safetensors").values())
    assert summary["weight_sync_bytes"] == (STEPS + 1) * model_bytes
    assert summary["logprob_abs_max"] == max(row["train_infer_mismatch/logprob_abs_max"] for row in run.steps())
    seconds = [row["time/step_seconds"] for row in run.steps()]
    tokens = [row["tokens_per_second"] * row["time/step_seconds"] for row in run.steps()]
    assert summary["tokens_per_second"] == pytest.approx(sum(tokens) / sum(seconds))


def test_policy_learns_the_reward(run):
    """Greedy completions of held-out prompts earn it, and sampled ones earn it more often than at first."""
    summary = run.summary()
    assert summary["eval_before"] <= 0.5 < summary["eval_after"]
    rewards = [row["reward/mean"] for row in run.steps()]
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8])


def test_startup_time_is_reported_by_phase(run):
    start = json.loads((run.folder / "startup.json").read_text())
    phases = {phase["name"]: phase for phase in start["phases"]}
    assert list(phases)[:2] == ["command", "checks"]
    assert list(phases)[-2:] == ["first weight sync", "first completion"]
    assert {"cluster", "controller", "slots", "data", "trainer ranks", "rollout engines", "rollout workers"} <= set(
        phases
    )
    for phase in phases.values():
        assert sum(phase["by_kind"].values()) <= phase["seconds"] + 0.01, phase
        assert 0 <= phase["begin"] <= phase["begin"] + phase["seconds"] <= start["seconds"] + 0.01, phase
    kinds = start["by_kind"]
    assert sum(kinds.values()) == pytest.approx(start["seconds"], abs=0.01)
    assert set(kinds) == {"imports", "ray", "sglang", "megarl"}
    assert all(kinds[kind] > 0 for kind in ("imports", "ray", "megarl"))  # that of SGLang may be behind slow imports
    assert phases["rollout engines"]["by_kind"]["sglang"] > 0
    assert all(phases[name]["by_kind"]["imports"] > 0 for name in ("command", "controller", "trainer ranks"))
    (line,) = (line for line in run.command.stdout.splitlines() if line.startswith("started in "))
    assert line == f"started in {start['seconds']:.1f} s: " + ", ".join(
        f"{name} {kinds[kind]:.1f}"
        for kind, name in (("imports", "imports"), ("ray", "Ray"), ("sglang", "SGLang"), ("megarl", "megarl"))
    )


def test_every_step_has_metrics(run):
    rows = run.steps()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert 0 <= row["train_infer_mismatch/logprob_abs_max"] <= 1e-4
        assert 0 <= row["controller/own_fraction"] <= 1
        assert row["policy_version/min"] == row["step"] - 1
        assert row["weight_sync/bytes"] > 0
        assert row["time/step_seconds"] >= row["time/rollout_seconds"] + row["time/train_seconds"]
        assert all(isinstance(value, int | float) for value in row.values()), row


def test_only_informative_groups_have_a_gradient(run):
    rows = run.steps()
    informative = [row for row in rows if row["reward/informative_groups"] > 0]
    assert informative
    assert all(row["grad_norm"] > 0 for row in informative)
    assert all(row["grad_norm"] == 0 for row in rows if row["reward/informative_groups"] == 0)
    assert all(0 <= row["reward/mean"] <= 1 and row["reward/mean"] == row["reward/one"] for row in rows)


def test_rollout_files_are_complete(run, world):
    files = sorted((run.folder / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.parquet" for step in range(1, STEPS + 1)]
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    prompts = {json.loads(line)["prompt"] for line in (world / "data/train.jsonl").read_text().splitlines()}
    for step, file in enumerate(files, start=1):
        rows = pq.read_table(file).to_pylist()
        assert [row["group_id"] for row in rows] == [i // SAMPLES for i in range(GROUPS * SAMPLES)]
        for row in rows:
            assert row["step"] == step
            assert row["prompt"] in prompts
            assert row["policy_version_min"] == row["policy_version_max"] == step - 1
            assert row["num_tokens"] == len(row["token_ids"]) == len(row["logprobs"]) == len(row["loss_mask"])
            sampled = [token for token, mine in zip(row["token_ids"], row["loss_mask"], strict=True) if mine]
            assert tokenizer.decode(sampled, clean_up_tokenization_spaces=False) == row["response"]
            assert row["reward"] == float("1" in row["response"].replace("<eos>", "")) == dict(row["rewards"])["one"]
            assert all(value < 0 for value, mine in zip(row["logprobs"], row["loss_mask"], strict=True) if mine)
        assert_advantages_are_normalized_by_group(rows)


def assert_advantages_are_normalized_by_group(rows: list[dict[str, Any]]) -> None:
    for start in range(0, len(rows), SAMPLES):
        rewards = np.array([row["reward"] for row in rows[start : start + SAMPLES]])
        want = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        assert [row["advantage"] for row in rows[start : start + SAMPLES]] == pytest.approx(want.tolist(), rel=1e-5)


def test_tensorboard_has_every_step(run):
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    for tag in ("reward/mean", "loss", "weight_sync/seconds", "train_infer_mismatch/logprob_abs_max"):
        assert [event.step for event in events.Scalars(tag)] == list(range(1, STEPS + 1))
    assert [event.step for event in events.Scalars("eval/one")] == [0, STEPS]


def test_exported_model_is_trained_and_loads_in_transformers(run, world):
    model, info = AutoModelForCausalLM.from_pretrained(run.folder / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = load_file(world / "model" / "model.safetensors")
    after = {name: p for name, p in model.state_dict().items() if name in before}
    assert after.keys() == before.keys()
    assert all(torch.isfinite(p).all() for p in after.values())
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(run.folder / "model").eos_token == "<eos>"


@pytest.mark.slow
def test_disaggregated_engines_give_the_same_losses(world, tmp_path, launch, undisturbed):
    command = launch("train", write_run(world, tmp_path, placement=DISAGGREGATED))
    assert command.wait() == 0, command.stderr
    runs = (list_steps(tmp_path / "run"), undisturbed.steps())
    found, expected = ([{name: row[name] for name in COMPARED_METRICS} for row in steps] for steps in runs)
    assert len(found) == STEPS
    assert found == expected
