"""Helpers that run the stages without engines in SPMD fashion, and read what they write."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chaos.read import read_last_checkpoint, read_model
from megarl.checkpoint.compare import is_bitwise_equal
from megarl.config import STAGES, StageConfig
from megarl.config.load import make_config
from megarl.data.demo_arithmetic import write_arithmetic
from tests.end_to_end.tiny_world import patient, write_world

TIMED = ("time/", "tokens_per_second", "checkpoint/")


class DiedError(Exception):
    """Raised to simulate a killed run."""


def write_data(folder: Path) -> Path:
    """Write a model, 20 demonstrations and 20 pairs to `folder`, so that an epoch is a few steps; return `folder`."""
    write_world(folder)
    write_arithmetic(folder / "data", seed=0, num_train=20, num_heldout=6)
    return folder


def stage_tree(stage: str, data_dir: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """Return a config of 8 steps on two ranks, with evaluations and checkpoints; `sections` replace whole sections."""
    data = {"path": str(data_dir / "data/sft.jsonl")}
    if stage != "sft":
        files = {"path": "preferences", "eval_path": "heldout-preferences"}
        data = {name: str(data_dir / f"data/{file}.jsonl") for name, file in files.items()}
    tree = {
        "run_dir": str(run_dir),
        "model": {"path": str(data_dir / "model")},
        "data": data,
        "trainer": trainer(),
        "placement": {"slots_per_node": 2},
        "checkpoint": {"every": 3, "keep_last": 9},
    }
    return patient(tree | sections)


def trainer(**keys: Any) -> dict[str, Any]:
    optimizer = {"lr": 1e-2, "warmup_steps": 4}
    return {"steps": 8, "batch_size": 6, "eval_every": 2, "optimizer": optimizer} | keys


def stage_config(stage: str, data_dir: Path, run_dir: Path, **sections: Any) -> StageConfig:
    return make_config(STAGES[stage], stage_tree(stage, data_dir, run_dir, **sections))


def join_world() -> Any:
    """Initialize torch.distributed and return the world of the calling ranks."""
    import torch.distributed as dist

    from megarl.cluster.workers.spmd import SpmdWorld

    dist.init_process_group("gloo")
    return SpmdWorld("cpu")


def train(ranks: Any, stage: str, config: StageConfig, *, resume: str | None = None, at_step=None) -> list[str]:
    """Run the stage as `run_spmd_stage` does; return the messages of this rank.

    Args:
        at_step: a step and a function that is called with the event log when the step begins; `DiedError` from it
            ends the run.
    """
    from megarl import stages
    from megarl.controller.run_stage import begin_run
    from megarl.controller.spmd_stage import NO_TRACKING
    from megarl.tracking.progress import EventLog, MessageEvent

    events = EventLog()
    with ExitStack() as closing:
        checkpoint = ranks.run_on_rank0(lambda: begin_run(config, stage, resume, closing))
        if ranks.rank != 0:
            config = config.model_copy(update={"tracking": NO_TRACKING})
        run = getattr(stages, f"make_{stage}")(config, events, ranks, checkpoint)
        make_request, step = run.make_train_request, run.step

        def make_watched_request(rows: list[int]) -> Any:
            nonlocal step
            step += 1
            if at_step is not None and step == at_step[0]:
                at_step[1](events)
            return make_request(rows)

        run.make_train_request = make_watched_request
        try:
            run.train()
        except DiedError:
            run.checkpoints._thread.shutdown()
    return [event.text for event in events.since(0)[0] if isinstance(event, MessageEvent)]


def train_uninterrupted(stage: str, config: StageConfig) -> list[str]:
    """Run the whole stage; for `run_ranks`."""
    return train(join_world(), stage, config)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return all lines of metrics.jsonl, without timings."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


def losses(run_dir: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in metrics(run_dir) if "loss" in row}


def assert_same_results(run: Path, uninterrupted: Path) -> None:
    """Assert that metrics, last checkpoint and exported model are bitwise identical."""
    assert metrics(run) == metrics(uninterrupted)
    saved, expected = read_last_checkpoint(run), read_last_checkpoint(uninterrupted)
    assert any("optimizer.state.exp_avg" in name for name in expected)
    assert {name for name in expected if not is_bitwise_equal(saved.get(name), expected[name])} == set()
    assert saved.keys() == expected.keys()
    assert read_model(run / "model") == read_model(uninterrupted / "model") != {}
