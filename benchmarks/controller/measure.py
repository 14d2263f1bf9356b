"""Runs steps of GRPO with the product's controller on a fake cluster and measures the controller's CPU and memory."""

from __future__ import annotations

import json
import pickle
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

import numpy as np

from benchmarks.controller.cluster import (
    PROMPT_TOKENS,
    Cost,
    FakeCluster,
    FakeModelSync,
    fetched_per_used,
    request_bytes,
)
from megarl.algorithms import find_algorithm
from megarl.batch.balance import QWEN2_5_7B
from megarl.batch.pack import SampleTable
from megarl.batch.trajectory import Prompt
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.process.process_start import collect_rarely
from megarl.config import RunConfig
from megarl.data.sampler import PromptOrder, RunPrompts
from megarl.megatron.requests import TrainStats
from megarl.run.checkpointer import POLICY, Checkpointer
from megarl.run.remote.trainer_group import AuxiliaryModels
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch
from megarl.run.run_parts import RunParts
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.run.sync.weight_sync import WeightSync
from megarl.tracking.progress import EventLog
from megarl.tracking.timing import PhaseTimer, Startup

GROUP_SIZE = 8

PROMPT_BYTES = 400

HELD_OUT_PROMPTS = 64

EVERY = 3
"""Number of steps between evaluations, and between checkpoints."""

DISPATCHES = 3
"""Measured dispatches, of which the median counts."""

BYTES_PER_TOKEN = 13
"""Token id, log-probability, mask and version of a token, uncompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a run."""

    ranks: int
    trajectories: int
    replicas: int
    """Number of data-parallel replicas."""
    rollout_workers: int = 64
    mini_batches: int = 2
    response_tokens: int = 2000
    """Largest number of tokens of a response; the shortest one has half of them."""
    steps: int = 6
    slow_rank_seconds: float = 0.0
    """How long one rank trains in each step while the others wait."""

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens in a micro-batch."""
        return max(16384, PROMPT_TOKENS + self.response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReport:
    """Costs of the controller in one step: medians over steps after the first one."""

    ranks: int
    trajectories: int
    replicas: int
    response_tokens: int
    train_call_cpu_seconds: float
    """CPU of `train_policy`: request, micro-batch plan, one stored value per replica, the call of each rank."""
    step_cpu_seconds: float
    """CPU of a step from its prompts to its metrics, all calls included."""
    cpu_seconds_by_step: list[float]
    """The same of each step, the first one included."""
    calibration_cpu_seconds: float
    """CPU of `calibrate` in this process: the same program takes as long on machines that are equally fast."""
    train_call_calibrated: float
    """`train_call_cpu_seconds` over `calibration_cpu_seconds`."""
    step_calibrated: float
    """`step_cpu_seconds` over `calibration_cpu_seconds`."""
    calls_per_rank: dict[str, float]
    """Calls of each rank in a step, by method: means over all steps."""
    rank_calls_cpu_seconds: float
    """CPU of one call of each rank with a kilobyte, and of waiting for the answers."""
    rank_calls_seconds: float
    """Time of these calls: no dispatch that calls each rank takes less."""
    rss_mb: float
    """Growth of the controller's anonymous memory over its first step."""
    prompt_bytes: float
    """Growth of anonymous memory by the prompts, per prompt."""
    step_seconds: float
    """Duration of a step."""
    dispatch_seconds: float
    """Time from the training request, whose samples lie where they were sampled, until each rank holds its samples."""
    dispatch_cpu_seconds: float
    """CPU of the controller in that time, the call of each rank included."""
    fetched_per_used: float
    """Tokens of the groups that a replica fetches, over tokens that it trains on; mean over the replicas."""
    tokens_per_trajectory: int
    """Mean number of tokens."""
    sample_mb: float
    """Size of the samples of a step, in units of 1e6 bytes, at `BYTES_PER_TOKEN`."""
    dispatch_mb: float
    """What passes through the controller for them: summaries, and requests with references."""
    dispatch_cpu_ms_per_mb: float
    """CPU of the controller in a dispatch over `sample_mb`."""
    cpu_seconds_by_phase: dict[str, float]
    peer_dispatch_mb: float | None = None
    """What passes through verl's controller, which collects the samples and dispatches them."""
    peer_dispatch_cpu_ms_per_mb: float | None = None
    """CPU of verl's controller in that time over `sample_mb`."""


class MeasuredRun(RLRun):
    """A run that measures the CPU time of this process, all of its threads, by step and by method."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cpu_seconds: list[dict[str, float]] = []
        """By step, method -> seconds."""
        self.step_seconds: list[float] = []
        self.rss_after_first_step = 0
        self.summary_bytes = 0
        """Size of the summaries of the last step's groups, as they were received."""

    def steps(self) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step, and measure it."""
        steps = super().steps()
        while True:
            began, cpu = time.perf_counter(), time.process_time()
            prompts = next(steps, None)
            if prompts is None:
                return
            self.cpu_seconds.append({})
            yield prompts
            self.cpu_seconds[-1]["step"] = time.process_time() - cpu
            self.step_seconds.append(time.perf_counter() - began)
            self.rss_after_first_step = self.rss_after_first_step or anonymous_bytes()

    @override
    def finish_step(self, batch: RolloutBatch, stats: TrainStats | None) -> None:
        """Finish the step, and measure the size of the summaries in the last one."""
        self._measured("finish_step", batch, stats)
        if self.step == self.config.trainer.steps:
            self.summary_bytes = sum(len(pickle.dumps(group.summary, 5)) for group in batch.all_groups)

    def _measured(self, name: str, *arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return getattr(super(), name)(*arguments, **options)
        finally:
            found = self.cpu_seconds[-1]
            found[name] = found.get(name, 0.0) + time.process_time() - began


def _measured_method(name: str) -> Any:
    def method(self: MeasuredRun, *arguments: Any, **options: Any) -> Any:
        return self._measured(name, *arguments, **options)

    return method


MEASURED_METHODS = ("sample", "estimate", "train_policy")
for _name in MEASURED_METHODS:
    setattr(MeasuredRun, _name, _measured_method(_name))


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


def calibrate() -> float:
    """Return the CPU seconds of a fixed program of Python objects, pickles and small arrays, as a controller's."""
    began = time.process_time()
    for _ in range(20):
        rows = [(i, float(i % 7), {"match": float(i % 2)}, "stop") for i in range(5000)]
        rows = pickle.loads(pickle.dumps(rows, 5))
        lengths = np.array([i % 1999 for i, *_ in rows], np.int64)
        for part in np.array_split(np.argsort(lengths, kind="stable"), 200):
            lengths[part].sum()
        sorted(sum(terms.values()) * value for _, value, terms, _ in rows)
    return time.process_time() - began


def measure(work: Workload, folder: Path, prompt_bytes: float) -> ControllerReport:
    """Run some steps in this process, which is connected to Ray, and return their costs."""
    config = make_config(work, folder)
    grid = RankGrid(tp=work.ranks // work.replicas, dp=work.replicas)
    with ExitStack() as closing:
        cluster = FakeCluster.start(config, grid, QWEN2_5_7B, slow_rank_seconds=work.slow_rank_seconds)
        closing.callback(cluster.shutdown)
        monitor = RunMonitor(config, lambda text: None)
        closing.push(monitor.close)
        return _measure_run(make_run(config, cluster, monitor), cluster, work, grid, prompt_bytes)


def _measure_run(
    run: MeasuredRun, cluster: FakeCluster, work: Workload, grid: RankGrid, prompt_bytes: float
) -> ControllerReport:
    cluster.call_ranks()
    rank_calls = [cluster.call_ranks() for _ in range(3)]
    cluster.counts.clear()
    collect_rarely()  # as a run does before its first step
    calibrations = [calibrate() for _ in range(3)]
    rss_before = anonymous_bytes()
    find_algorithm(run.config.algorithm.type)().train(run, run.config.algorithm)
    counts = dict(cluster.counts)
    calibrations += [calibrate() for _ in range(3)]
    rank_calls += [cluster.call_ranks() for _ in range(2)]
    request = cluster.trainer.last_request
    dispatch = Cost.median([cluster.dispatch(request) for _ in range(DISPATCHES)])
    run.save()
    run.finish()
    num_tokens = sum(SampleTable.of(batch.samples).num_tokens for batch in request.mini_batches)
    sample_mb = BYTES_PER_TOKEN * num_tokens / 1e6
    dispatch_mb = (run.summary_bytes + request_bytes(request, grid)) / 1e6
    calls, calibration = Cost.median(rank_calls), statistics.median(calibrations)
    later = run.cpu_seconds[1:]
    median = {name: statistics.median(step[name] for step in later) for name in later[0]}
    return ControllerReport(
        ranks=work.ranks,
        trajectories=work.trajectories,
        replicas=work.replicas,
        response_tokens=work.response_tokens,
        train_call_cpu_seconds=median["train_policy"],
        step_cpu_seconds=median["step"],
        cpu_seconds_by_step=[step["step"] for step in run.cpu_seconds],
        calibration_cpu_seconds=calibration,
        train_call_calibrated=median["train_policy"] / calibration,
        step_calibrated=median["step"] / calibration,
        calls_per_rank={name: num / work.ranks / work.steps for name, num in counts.items()},
        rank_calls_cpu_seconds=calls.cpu_seconds,
        rank_calls_seconds=calls.seconds,
        rss_mb=(run.rss_after_first_step - rss_before) / 1e6,
        prompt_bytes=prompt_bytes,
        step_seconds=statistics.median(run.step_seconds[1:]),
        dispatch_seconds=dispatch.seconds,
        dispatch_cpu_seconds=dispatch.cpu_seconds,
        fetched_per_used=fetched_per_used(request, grid),
        tokens_per_trajectory=round(num_tokens / work.trajectories),
        sample_mb=sample_mb,
        dispatch_mb=dispatch_mb,
        dispatch_cpu_ms_per_mb=1000 * dispatch.cpu_seconds / sample_mb,
        cpu_seconds_by_phase=median,
    )


def make_config(work: Workload, folder: Path) -> RunConfig:
    """Return the configuration of the run, whose model in `folder` has a config.json only."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    for name in ("prompts", "held-out"):
        (folder / f"{name}.jsonl").touch()
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "prompts.jsonl")},
            "reward": {"terms": {"match": {"type": "numeric"}}},
            "algorithm": {
                "type": "grpo",
                "prompts_per_step": work.trajectories // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "num_mini_batches": work.mini_batches,
                "kl_loss": None,
            },
            "trainer": {
                "steps": work.steps,
                "eval_every": EVERY,
                "max_tokens_per_micro_batch": work.max_tokens,
                "parallel": {"tp": work.ranks // work.replicas},
            },
            "checkpoint": {"every": EVERY},
            "placement": {"device": "cpu", "slots_per_node": 8, "nodes": max(8, work.ranks // 8)},
            "rollout": {"workers": work.rollout_workers, "max_new_tokens": work.response_tokens, "replicas": 64},
            "tracking": {"tensorboard": False},
        }
    )


def make_run(config: RunConfig, cluster: FakeCluster, monitor: RunMonitor) -> MeasuredRun:
    """Return the run, put together as the product does it, with its monitor and checkpoints."""
    prompts = [
        Prompt(
            prompt_id=f"p{i}",
            text="x" * PROMPT_BYTES,
            token_ids=(1,) * PROMPT_TOKENS,
            row={"question": "x" * PROMPT_BYTES},
        )
        for i in range(config.algorithm.prompts_per_step)
    ]
    order = PromptOrder(len(prompts), config.seed, config.data.shuffle)
    monitor.watch(cluster.processes, cluster.rollout.actors)
    engines: Any = cluster.engines
    policy: Any = FakeModelSync(cluster.trainer, cluster.engines)
    parts = RunParts(
        trainer=cluster.trainer,
        models=AuxiliaryModels(trained={}, frozen={}, dedicated=frozenset()),
        rollout=cluster.rollout,
        sync=WeightSync(lambda _: policy),
        prompts=RunPrompts(training=prompts, order=order, held_out=prompts[:HELD_OUT_PROMPTS]),
        engines=engines,
        checkpoints=Checkpointer(config, {POLICY: cluster.trainer}, lambda text: None),
        monitor=monitor,
    )
    return MeasuredRun(config, EventLog(), PhaseTimer(), Startup(time.time()), parts)
