"""A resumed run makes the calls and logs the metrics of an uninterrupted one; one that lost its folder logs nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.run_lock import RunLock
from megarl.config import SftConfig
from megarl.config.load import make_config
from megarl.data.sampler import PromptOrder, SamplerState
from megarl.errors import DataError, LostLockError
from megarl.megatron.requests import TrainRequest
from megarl.run.events import EventLog
from megarl.run.mismatch_limits import MismatchHistory
from megarl.run.run_state import RunState
from megarl.run.run_totals import RunTotals
from megarl.run.stage_run import StageRun
from megarl.tracking.phases import PhaseTimer
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.algorithms.test_training_loops import SAFE_TERMS
from tests.checkpoint.run_folder import take_over

STEPS, SAVED = 10, 8

CRITIC = {"pretraining": {"max_steps": 3, "settled": 0.01, "window": 1, "min_explained_variance": 0.9}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_loss": None, "kl_reward": {"kind": "k3", "coefficient": 0.1, "target": 0.3, "horizon": 20}},
    "dapo": {"max_batches": 3},
    "remax": {},
    "ppo": {},
    "pf_ppo": {},
    "vapo": CRITIC,
    "safe_rlhf": {"multiplier_lr": 0.05},
    "prime": {},
}


def reward(label: str, prompt: int, sample: int) -> float:
    """Reward that differs between samples; constant for odd prompts of labels that end in "-1"."""
    if prompt % 2 == 1 and label.endswith("-1"):
        return 1.0
    return math.sin(len(label) * 7 + sum(map(ord, label)) + prompt * 3 + sample)


def step_of(request: TrainRequest) -> int:
    """Return the number of the step, which is part of the folder for dumps."""
    return int(Path(request.guard.dump_folder or "").name.removeprefix("step-"))


def train(folder: Path, name: str, *, stops_after: int | None = None, resumed: RunState | None = None) -> FinishedRun:
    events = EventLog()

    def script(label: str, prompt: int, sample: int) -> float:
        if stops_after is not None and label.startswith(f"step-{stops_after}"):
            events.request_stop()
        return reward(label, prompt, sample)

    def mismatch(request: TrainRequest) -> dict[str, float]:
        return {"train_infer_mismatch/kl": 2e-9 * step_of(request) ** 3}

    sections: dict[str, Any] = SAFE_TERMS if name == "safe_rlhf" else {}
    models: dict[str, dict[str, Any]] = {"policy": {"metrics": mismatch}}
    if name == "safe_rlhf":
        models["reward cost"] = {"score": lambda key: 1.0 + key[1]}
    algorithm = {"type": name, **ALGORITHMS[name]}
    return run_script(folder, algorithm, script, steps=STEPS, events=events, resumed=resumed, models=models, **sections)


def calls_after(run: FinishedRun, after: int) -> list[tuple[str, str, str]]:
    """Return all calls of the steps after `after`, in order."""
    steps = [f"step-{step}" for step in range(after + 1, STEPS + 1)]
    first = next(
        n for n, a in enumerate(run.log) if a.method == "sample" and a.argument.label.split("-greedy")[0] in steps[:1]
    )
    folder = run.run.config.run_dir
    return [(a.target, a.method, repr(a.argument).replace(folder, "")) for a in run.log[first:]]


def metrics_after(run: FinishedRun, after: int) -> list[dict[str, float]]:
    """Return the metrics of the steps after `after`, without measured times and sizes."""
    measured = ("time/", "tokens_per_second", "controller/", "rollout/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in run.metrics if row["step"] > after]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_makes_the_same_calls_and_metrics(name: str, tmp_path: Path) -> None:
    full = train(tmp_path / "full", name)
    stopped = train(tmp_path / "parts", name, stops_after=SAVED)
    assert stopped.run.step == SAVED
    stopped.run.state().write(tmp_path)
    resumed_run = train(tmp_path / "parts", name, resumed=RunState.read(tmp_path))
    assert [row["step"] for row in resumed_run.metrics] == list(range(1, STEPS + 1))
    assert len(metrics_after(full, SAVED)) == STEPS - SAVED
    assert metrics_after(resumed_run, SAVED) == metrics_after(full, SAVED)
    assert calls_after(resumed_run, SAVED) == calls_after(full, SAVED)
    if name != "prime":  # which trains in fewer steps
        first = resumed_run.arguments("policy", "train")[0]
        assert first.guard.mismatch["logprob_kl"].max == pytest.approx(4 * 2e-9 * SAVED**3)
    assert resumed_run.run.state().mismatch == full.run.state().mismatch
    assert resumed_run.pushed_versions[0] == stopped.pushed_versions[-1] == SAVED
    assert resumed_run.run.state().totals.tokens == full.run.state().totals.tokens
    assert resumed_run.run.state().algorithm_state == full.run.state().algorithm_state


def test_metrics_after_the_saved_step_are_discarded(tmp_path: Path) -> None:
    stopped = train(tmp_path / "run", "grpo", stops_after=SAVED)
    state = stopped.run.state()
    train(tmp_path / "run", "grpo", resumed=state)
    train(tmp_path / "run", "grpo", resumed=state)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_state_round_trips_exactly(tmp_path: Path) -> None:
    state = RunState(
        step=7,
        policy_version=6,
        samplers={"prompts": SamplerState(epoch=1, position=3, seed=2**40)},
        algorithm_state={"kl": {"coefficient": 0.1 + 0.2}, "odd": {"value": math.inf}},
        mismatch={"logprob_kl": MismatchHistory(dtype="bfloat16", passed=(1 / 3, 1e-300))},
        metrics_bytes=2**40,
        totals=RunTotals(evaluations={0: 1 / 3}, seconds_by_phase={"train": 1e-300}, logprob_abs_max=math.inf),
    )
    state.write(tmp_path)
    assert RunState.read(tmp_path) == state


def test_an_unreadable_state_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with pytest.raises(DataError, match=rf"^{path} cannot be read: No such file"):
        RunState.read(tmp_path)
    path.write_text('{"step": "many"}')
    with pytest.raises(DataError, match=rf"^{path}: step: Input should be a valid integer"):
        RunState.read(tmp_path)


def make_run(run_dir: Path, resumed: RunState | None = None) -> StageRun:
    config = make_config(SftConfig, {"run_dir": str(run_dir), "model": {"path": "m"}, "data": {"path": "d"}})
    return StageRun(config, EventLog(), PhaseTimer(), order=PromptOrder(8, 0, shuffle=False), resumed=resumed)


def test_a_run_that_lost_its_folder_neither_logs_metrics_nor_truncates_them_when_it_recovers(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        run = make_run(tmp_path)
        run.log({"loss": 1.0})
        written = (tmp_path / "metrics.jsonl").read_text()
        take_over(tmp_path)
        with pytest.raises(LostLockError, match=f"run_dir {tmp_path} .*pid 123 on host n2"):
            run.log({"loss": 2.0})
        with pytest.raises(LostLockError):
            make_run(tmp_path, RunState())
        assert (tmp_path / "metrics.jsonl").read_text() == written
