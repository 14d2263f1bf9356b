"""Steps that are trained again on the same groups: they skip and reject the updates that they did before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.limits import LimitConfig
from megarl.config.run import CheckpointConfig
from megarl.controller.recovery import discard_partial_journal
from megarl.controller.replay import first_difference
from megarl.errors import DataError, LimitError
from megarl.megatron.requests import TrainRequest, TrainStats, UpdateGuardSpec
from megarl.rollout.journal import journal_folder, list_steps, step_folder
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.run_logs import StepUpdate, UpdateLog, list_files, log_folder, update_folder
from megarl.run.run_state import RunState
from tests.algorithms.scripted_run import FakeModelSync, FakeRolloutGroup, FinishedRun, run_script
from tests.errors import expect_error
from tests.run.finished_groups import run_config

GRPO = {"type": "grpo", "kl_loss": None}


def informative(label: str, prompt: int, sample: int) -> float:
    return float(sample % 2)


def train_requests(run: FinishedRun) -> list[TrainRequest]:
    return [call.argument for call in run.log if (call.target, call.method) == ("policy", "train")]


def test_a_skipped_update_is_skipped_again_whatever_the_limits_are(tmp_path: Path) -> None:
    limits = {"reward": {"min": 100, "action": "skip"}}
    before = run_script(tmp_path, GRPO, informative, steps=2, limits=limits)
    assert train_requests(before) == []
    again = run_script(tmp_path, GRPO, informative, steps=3)
    assert len(train_requests(again)) == 1
    skipped = [text for text in again.messages if "passed limits.reward.min = 100" in text]
    assert [text.split(":")[0] for text in skipped] == ["step 1", "step 2"]
    assert again.run.state().skips_in_a_row == 2


def test_a_trained_step_is_trained_again_whatever_the_limits_are(tmp_path: Path) -> None:
    run_script(tmp_path, GRPO, informative, steps=2)
    limits = {"reward": {"min": 100, "action": "skip"}, "grad_norm": 1e-9}
    again = run_script(tmp_path, GRPO, informative, steps=3, limits=limits)
    assert [request.guard.grad_norm for request in train_requests(again)] == [None, None]


def test_rejected_updates_are_rejected_by_the_limits_of_then(tmp_path: Path) -> None:
    def rejected(request: TrainRequest) -> dict[str, float]:
        return {"updates": 1.0, "skipped/grad_norm": 1.0}

    limit = {"max": 2.0, "action": "skip"}
    models: dict[str, Any] = {"policy": {"metrics": rejected}}
    run_script(tmp_path, GRPO, informative, steps=1, models=models, limits={"grad_norm": limit})
    again = run_script(tmp_path, GRPO, informative, steps=2, models=models)
    guards = [request.guard.grad_norm for request in train_requests(again)]
    assert guards == [LimitConfig.model_validate(limit), None]
    other = run_script(tmp_path, GRPO, informative, steps=1)
    assert [text for text in other.messages if "the weights differ from here on" in text] == [
        "step 1: 0 updates were applied, none skipped; before, 1 updates were applied, skipped/grad_norm 1: "
        "the weights differ from here on"
    ]


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_a_probe_decides_once(tmp_path: Path, later: float) -> None:
    """The second time, the engines are not asked: they might differ from the trainer by another amount."""
    limits = {key: {"max": 0.1, "action": "skip"} for key in ("logprob_kl", "logprob_abs_p99")}
    options: dict[str, Any] = {"limits": limits, "steps": 3, "schedule": {"type": "one_step_off"}}
    first = run_script(tmp_path / "first", GRPO, informative, rollout_fields={"mismatch": 1.0 - later}, **options)
    probed = [call.argument for call in first.log if call.method == "probe"]
    assert probed
    (tmp_path / "again" / "journal").mkdir(parents=True)
    update_folder(journal_folder(tmp_path / "first")).rename(update_folder(journal_folder(tmp_path / "again")))
    again = run_script(tmp_path / "again", GRPO, informative, rollout_fields={"mismatch": later}, **options)
    assert [call.argument for call in again.log if call.method == "probe"] == []
    assert len(train_requests(again)) == len(train_requests(first))
    names = [name for name in first.metrics[1] if "mismatch" in name]
    assert [[row.get(name) for name in names] for row in again.metrics] == [
        [row.get(name) for name in names] for row in first.metrics
    ]


def test_records_are_of_a_batch_and_the_last_one_counts(tmp_path: Path) -> None:
    log = UpdateLog(tmp_path, after=0)
    records = [StepUpdate(step=3, batch="a", updates=1), StepUpdate(step=3, batch="b", skipped="why", probe={"x": 0.1})]
    for record in records:
        log.write(record)
    log.begin_file()
    log.write(StepUpdate(step=4, batch="c", updates=2, rejected={"skipped/mismatch": 1}, guard={"grad_norm": None}))
    for each in (UpdateLog(tmp_path, after=0), UpdateLog(tmp_path, after=2)):
        assert [each.find(3, batch) for batch in "abc"] == [*records, None]
        assert each.find(4, "c") is not None
    assert UpdateLog(tmp_path, after=3).find(3, "a") is None
    path = list_files(update_folder(journal_folder(tmp_path)))[-1]
    path.write_text('{"step": 4}\n')
    with expect_error(DataError, f"{path}: ", "step and batch"):
        UpdateLog(tmp_path, after=3)


def test_a_guard_without_rejections_rejects_nothing() -> None:
    guard = UpdateGuardSpec(grad_norm=LimitConfig(max=1.0), mismatch={"logprob_kl": LimitConfig(max=0.1)})
    record = StepUpdate(step=1, batch="a").trained(TrainStats(metrics={"updates": 2.0}, num_tokens=1), guard)
    assert record == StepUpdate(step=1, batch="a", updates=2)
    assert record.apply_guard(guard) == UpdateGuardSpec()
    rejected = StepUpdate(step=1, batch="a").trained(
        TrainStats(metrics={"updates": 1.0, "skipped/mismatch": 1.0, "skipped/grad_norm": 0.0}, num_tokens=1), guard
    )
    assert rejected.rejected == {"skipped/mismatch": 1}
    restored = StepUpdate(**json.loads(json.dumps({"step": 1, "batch": "a", "guard": dict(rejected.guard)})))
    assert restored.apply_guard(UpdateGuardSpec()) == guard


def test_the_first_step_that_differs_is_named(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 0.5 * n, "updates": 1.0, "tokens_per_second": 3.0, "time/x": n} for n in range(1, 5)]
    for name, loss in (("run", 1.5), ("same", 1.5), ("other", 1.25)):
        rows[2]["loss"] = loss
        (tmp_path / name).write_text("".join(json.dumps(row | {"time/x": loss}) + "\n" for row in rows))
    assert first_difference(tmp_path / "run", tmp_path / "same") is None
    assert first_difference(tmp_path / "run", tmp_path / "other") == 3
    assert first_difference(tmp_path / "run", tmp_path / "missing") is None


def test_clocks_resume_when_a_push_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push, calls = FakeModelSync.push, list[str]()

    def failing(self: FakeModelSync, policy_version: int) -> Any:
        if policy_version == 2:
            calls.extend(call.method for call in self.log if call.target == "clocks")
            monkeypatch.setattr("tests.algorithms.scripted_run.FakeRolloutGroup.resume_clocks", resumed)
            raise LimitError("the push fails")
        return push(self, policy_version)

    def resumed(self: Any) -> None:
        calls.append("resume after the failure")

    monkeypatch.setattr(FakeModelSync, "push", failing)
    with expect_error(LimitError, "fails"):
        run_script(tmp_path, GRPO, informative, steps=3, schedule={"type": "async"})
    assert calls[-2:] == ["pause", "resume after the failure"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_journal_of_a_run_without_checkpoints_is_bounded(tmp_path: Path, kind: str) -> None:
    journal = journal_folder(tmp_path)

    def sizes(keep: str) -> tuple[list[int], int, int]:
        def script(label: str, prompt: int, sample: int) -> float:
            step_folder(journal, int(label.split("-")[1])).mkdir(parents=True, exist_ok=True)  # as the workers do
            return informative(label, prompt, sample)

        checkpoint = {"every": 0, "keep_journal": keep}
        run_script(tmp_path, GRPO, script, steps=12, checkpoint=checkpoint, schedule={"type": kind})
        files = [list_files(folder) for folder in (log_folder(journal), update_folder(journal))]
        return list_steps(tmp_path), len(files[0]), len(files[1])

    steps, events, updates = sizes("needed")
    assert len(steps) <= 5
    assert max(events, updates) <= 2
    if kind == "sync":
        assert len(sizes("all")[0]) == 12


@pytest.mark.parametrize("first", [1, 7])
def test_a_run_that_starts_over_uses_a_journal_only_from_its_first_step(tmp_path: Path, first: int) -> None:
    config = run_config(GRPO, run_dir=str(tmp_path), checkpoint=CheckpointConfig(every=0).model_dump())
    for step in (0, first, first + 1):
        step_folder(journal_folder(tmp_path), step).mkdir(parents=True)
    UpdateLog(tmp_path, after=0).write(StepUpdate(step=first, batch="a"))
    discard_partial_journal(config)
    assert list_steps(tmp_path) == ([0, 1, 2] if first == 1 else [0])
    assert bool(list_files(update_folder(journal_folder(tmp_path)))) == (first == 1)


@pytest.mark.parametrize("lost", [True, False])
def test_later_steps_are_sampled_again_if_the_journal_has_lost_groups_of_a_step(
    tmp_path: Path, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights after that step may be others than those that have sampled the later ones."""
    collect = FakeRolloutGroup.collect

    def replayed(self: FakeRolloutGroup, *prompts: Any, label: str, **given: Any) -> list[FinishedGroup]:
        groups = collect(self, *prompts, label=label, **given)
        is_first = [n == 0 and lost and label == "step-4" for n in range(len(groups))]
        summaries = [replace(g.summary, replayed=not new) for g, new in zip(groups, is_first, strict=True)]
        return [replace(g, summary=summary) for g, summary in zip(groups, summaries, strict=True)]

    monkeypatch.setattr(FakeRolloutGroup, "collect", replayed)
    for step in range(3, 8):
        step_folder(journal_folder(tmp_path), step).mkdir(parents=True)
    run = run_script(tmp_path, GRPO, informative, steps=6, resumed=RunState(step=2, policy_version=2))
    assert list_steps(tmp_path) == ([3, 4] if lost else [3, 4, 5, 6, 7])
    message = "step 4: the journal lacks groups of this step; those of later steps are sampled again"
    assert run.messages.count(message) == lost
