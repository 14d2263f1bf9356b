"""Stages without engines on ranks that run the loop themselves, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chaos.compare import same
from benchmarks.chaos.read import read_last_checkpoint, read_model
from megarl.config import STAGES, StageConfig
from megarl.config.load import make_config
from megarl.data.demo_arithmetic import write_arithmetic
from tests.end_to_end.tiny_world import write_world

TIMED = ("time/", "tokens_per_second", "checkpoint/")


class DiedError(Exception):
    """As if it had been killed."""


def write_data(folder: Path) -> Path:
    """Write a model, 20 demonstrations and as many pairs into `folder`, and return it: a few steps are an epoch."""
    write_world(folder)
    write_arithmetic(folder / "data", seed=0, num_train=20, num_heldout=6)
    return folder


def stage_tree(stage: str, world: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """The content of a YAML file: 8 steps on two ranks, evaluated and saved now and then; `sections` replace whole."""
    data = {"path": str(world / "data/sft.jsonl")}
    if stage != "sft":
        files = {"path": "preferences", "eval_path": "heldout-preferences"}
        data = {name: str(world / f"data/{file}.jsonl") for name, file in files.items()}
    return {
        "run_dir": str(run_dir),
        "model": {"path": str(world / "model")},
        "data": data,
        "trainer": trainer(),
        "placement": {"slots_per_node": 2},
        "checkpoint": {"every": 3, "keep_last": 9},
    } | sections


def trainer(**keys: Any) -> dict[str, Any]:
    """The section of that name."""
    optimizer = {"lr": 1e-2, "warmup_steps": 4}
    return {"steps": 8, "batch_size": 6, "eval_every": 2, "optimizer": optimizer} | keys


def stage_config(stage: str, world: Path, run_dir: Path, **sections: Any) -> StageConfig:
    """See `stage_tree`."""
    return make_config(STAGES[stage], stage_tree(stage, world, run_dir, **sections))


def join() -> Any:
    """The world of the ranks that call this."""
    import torch.distributed as dist

    from megarl.workers.spmd import SpmdWorld

    dist.init_process_group("gloo")
    return SpmdWorld("cpu")


def train(
    ranks: Any,
    stage: str,
    config: StageConfig,
    *,
    resume: str | None = None,
    at_step: tuple[int, Callable[[Any], None]] | None = None,
) -> list[str]:
    """The stage as `run_spmd_stage` runs it; what it said on this rank.

    Args:
        at_step: what to do with its events while the step of that number is begun; `DiedError` from it ends the run.
    """
    from megarl.controller.run_stage import begin_run
    from megarl.controller.spmd_stage import NOTHING
    from megarl.run.events import EventLog, MessageEvent
    from megarl.stages import build_stages

    events = EventLog()
    with ExitStack() as closing:
        checkpoint = ranks.on_first(lambda: begin_run(config, stage, resume, closing))
        if ranks.rank != 0:
            config = config.model_copy(update={"tracking": NOTHING})
        run = getattr(build_stages, f"make_{stage}")(config, events, ranks, checkpoint)
        work, begun = run.make_train_request, run.step

        def watched(rows: list[int]) -> Any:
            nonlocal begun
            begun += 1
            if at_step is not None and begun == at_step[0]:
                at_step[1](events)
            return work(rows)

        run.make_train_request = watched
        try:
            run.train()
        except DiedError:
            run._checkpoints._thread.shutdown()
    return [event.text for event in events.since(0)[0] if isinstance(event, MessageEvent)]


def train_whole(stage: str, config: StageConfig) -> list[str]:
    """Undisturbed, for `run_ranks`."""
    return train(join(), stage, config)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """All lines, but for what is measured."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


def losses(run_dir: Path) -> dict[int, float]:
    """By step."""
    return {int(row["step"]): row["loss"] for row in metrics(run_dir) if "loss" in row}


def assert_same(run: Path, undisturbed: Path) -> None:
    """Metrics, the last checkpoint and the exported model are, to the last bit."""
    assert metrics(run) == metrics(undisturbed)
    saved, expected = read_last_checkpoint(run), read_last_checkpoint(undisturbed)
    assert any("optimizer.state.exp_avg" in name for name in expected)
    assert {name for name in expected if not same(saved.get(name), expected[name])} == set()
    assert saved.keys() == expected.keys()
    assert read_model(run / "model") == read_model(undisturbed / "model") != {}
