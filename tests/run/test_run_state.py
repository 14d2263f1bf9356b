"""A run that goes on from a saved state asks its models and engines for what it would have asked them anyway."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.data.sampler import SamplerState
from megarl.errors import DataError
from megarl.run.events import EventLog
from megarl.run.run_state import RunState
from megarl.run.run_totals import Books
from tests.algorithms.scripted_run import Scripted, run_script
from tests.algorithms.test_training_loops import SAFE_TERMS

STEPS, SAVED = 5, 2

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
    """Different of each; in every third prompt of an attempt all alike."""
    if prompt % 2 == 1 and label.endswith("-1"):
        return 1.0
    return math.sin(len(label) * 7 + sum(map(ord, label)) + prompt * 3 + sample)


def train(folder: Path, name: str, *, stops_after: int | None = None, resumed: RunState | None = None) -> Scripted:
    events = EventLog()

    def script(label: str, prompt: int, sample: int) -> float:
        if stops_after is not None and label.startswith(f"step-{stops_after}"):
            events.finish_early()
        return reward(label, prompt, sample)

    sections: dict[str, Any] = SAFE_TERMS if name == "safe_rlhf" else {}
    models = {"reward cost": {"score": lambda key: 1.0 + key[1]}} if name == "safe_rlhf" else {}
    algorithm = {"type": name, **ALGORITHMS[name]}
    return run_script(folder, algorithm, script, steps=STEPS, events=events, resumed=resumed, models=models, **sections)


def asked(run: Scripted, after: int) -> list[tuple[str, str, str]]:
    """All calls of the steps behind `after`, in order."""
    steps = [f"step-{step}" for step in range(after + 1, STEPS + 1)]
    first = next(
        n for n, a in enumerate(run.log) if a.what == "sample" and a.work.label.split("-greedy")[0] in steps[:1]
    )
    folder = run.run.config.run_dir
    return [(a.who, a.what, repr(a.work).replace(folder, "")) for a in run.log[first:]]


def told(run: Scripted, after: int) -> list[dict[str, float]]:
    """Metrics of the steps behind `after`, save what is measured."""
    measured = ("time/", "tokens_per_second", "controller/", "rollout/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in run.metrics if row["step"] > after]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_asks_and_says_the_same(name: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", name)
    part = train(tmp_path / "parts", name, stops_after=SAVED)
    assert part.run.step == SAVED
    part.run.state().write(tmp_path)
    rest = train(tmp_path / "parts", name, resumed=RunState.read(tmp_path))
    assert [row["step"] for row in rest.metrics] == list(range(1, STEPS + 1))
    assert len(told(whole, SAVED)) == STEPS - SAVED
    assert told(rest, SAVED) == told(whole, SAVED)
    assert asked(rest, SAVED) == asked(whole, SAVED)
    assert rest.pushed[0] == part.pushed[-1] == SAVED
    assert rest.run.state().books.tokens == whole.run.state().books.tokens
    assert rest.run.state().carried == whole.run.state().carried


def test_steps_behind_the_saved_one_are_forgotten(tmp_path: Path) -> None:
    part = train(tmp_path / "run", "grpo", stops_after=SAVED)
    state = part.run.state()
    train(tmp_path / "run", "grpo", resumed=state)
    train(tmp_path / "run", "grpo", resumed=state)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_every_number_survives(tmp_path: Path) -> None:
    state = RunState(
        step=7,
        policy_version=6,
        samplers={"prompts": SamplerState(epoch=1, position=3, seed=2**40)},
        carried={"kl": {"coefficient": 0.1 + 0.2}, "odd": {"value": math.inf}},
        metrics_bytes=2**40,
        books=Books(evaluations={0: 1 / 3}, seconds_by_phase={"train": 1e-300}, logprob_abs_max=math.inf),
    )
    state.write(tmp_path)
    assert RunState.read(tmp_path) == state


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with pytest.raises(DataError, match=rf"^{path} cannot be read: No such file"):
        RunState.read(tmp_path)
    path.write_text('{"step": "many"}')
    with pytest.raises(DataError, match=rf"^{path}: step: Input should be a valid integer"):
        RunState.read(tmp_path)
