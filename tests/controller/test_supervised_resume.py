"""Fine-tuning and learning from pairs that die and go on, on two ranks that run the loop themselves."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.compare import same
from benchmarks.chaos.read import read_last_checkpoint, read_model
from megarl.checkpoint.store import CheckpointStore
from megarl.config import STAGES, StageConfig
from megarl.config.load import make_config
from megarl.data.arithmetic import write_arithmetic
from tests.end_to_end.tiny_world import write_world
from tests.megatron.ranks import run_ranks

STEPS, EVERY, DIES = 8, 3, 8
"""Ended while step 8 is begun, two checkpoints have been begun; the second may be whole or not."""

TIMED = ("time/", "tokens_per_second", "checkpoint/")


class DiedError(Exception):
    """As if it had been killed."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, 20 demonstrations and as many pairs: a few steps are an epoch."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    write_arithmetic(folder / "data", seed=0, num_train=20, num_heldout=6)
    return folder


def stage_config(stage: str, world: Path, run_dir: Path, **sections: Any) -> StageConfig:
    data = {"path": str(world / "data/sft.jsonl")}
    if stage != "sft":
        data = {name: str(world / f"data/{file}.jsonl") for name, file in PAIRS.items()}
    tree = {
        "run_dir": str(run_dir),
        "model": {"path": str(world / "model")},
        "data": data,
        "trainer": {"steps": STEPS, "batch_size": 6, "eval_every": 2, "optimizer": {"lr": 1e-2, "warmup_steps": 4}},
        "placement": {"slots_per_node": 2},
        "checkpoint": {"every": EVERY, "keep_last": 9},
    }
    return make_config(STAGES[stage], tree | sections)


PAIRS = {"path": "preferences", "eval_path": "heldout-preferences"}


def join() -> Any:
    import torch.distributed as dist

    from megarl.workers.spmd import SpmdWorld

    dist.init_process_group("gloo")
    return SpmdWorld("cpu")


def train(ranks: Any, stage: str, config: StageConfig, *, resume: str | None = None, dies: int = 0) -> list[str]:
    """The stage as `run_spmd_stage` runs it; what it said on this rank.

    Args:
        dies: while this step is begun; 0: never.
    """
    from megarl.controller import stages
    from megarl.controller.events import EventLog, Note
    from megarl.controller.launch import begin_run
    from megarl.controller.spmd import NOTHING

    events = EventLog()
    with ExitStack() as closing:
        checkpoint = ranks.on_first(lambda: begin_run(config, stage, resume, closing))
        if ranks.rank != 0:
            config = config.model_copy(update={"tracking": NOTHING})
        run = getattr(stages, f"make_{stage}")(config, events, ranks, checkpoint)
        work, begun = run.work, [run.step]

        def watched(rows: list[int]) -> Any:
            begun[0] += 1
            if begun[0] == dies:
                raise DiedError
            return work(rows)

        run.work = watched
        try:
            run.train()
        except DiedError:
            run._checkpoints._thread.shutdown()
    return [event.text for event in events.since(0)[0] if isinstance(event, Note)]


def train_both(stage: str, whole: StageConfig, parts: StageConfig) -> list[str]:
    """One undisturbed, one that dies and goes on."""
    ranks = join()
    train(ranks, stage, whole)
    train(ranks, stage, parts, dies=DIES)
    return train(ranks, stage, parts, resume="auto")


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """All lines, but for what is measured."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


def assert_same(run: Path, undisturbed: Path) -> None:
    assert metrics(run) == metrics(undisturbed)
    saved, expected = read_last_checkpoint(run), read_last_checkpoint(undisturbed)
    assert any("optimizer.state.exp_avg" in name for name in expected)
    assert {name for name in expected if not same(saved.get(name), expected[name])} == set()
    assert saved.keys() == expected.keys()
    assert read_model(run / "model") == read_model(undisturbed / "model") != {}


@pytest.mark.parametrize(
    ("stage", "sections"),
    [
        ("sft", {}),
        ("rm", {}),
        ("dpo", {}),
        ("dpo", {"dpo": {"reference": {"path": "model"}}}),
    ],
    ids=["sft", "rm", "dpo", "dpo with a reference of its own"],
)
def test_one_that_died_comes_to_the_same(stage: str, sections: Any, world: Path, tmp_path: Path) -> None:
    if sections:
        sections = {"dpo": {"reference": {"path": str(world / "model"), "parallel": {"tp": 2}}}}
    whole, parts = (stage_config(stage, world, tmp_path / name, **sections) for name in ("whole", "parts"))
    said = run_ranks(train_both, 2, tmp_path, stage, whole, parts)
    assert re.fullmatch(r"going on from step [36]: .*/parts/checkpoints/step-00000[36]", said[0])
    assert_same(tmp_path / "parts", tmp_path / "whole")
    assert len([row for row in metrics(tmp_path / "whole") if "loss" in row]) == STEPS
    steps = [saved.step for saved in CheckpointStore(tmp_path / "whole").saved()]
    assert steps == [3, 6, 8]
    if stage != "sft":
        before, after = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
        assert (before["eval_before"], before["eval_after"]) == (after["eval_before"], after["eval_after"])
