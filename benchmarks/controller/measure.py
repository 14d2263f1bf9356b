"""Runs steps of GRPO with the product's controller on a fake cluster and measures the controller's CPU and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.controller.cluster import Cost, FakeCluster, fetched_per_used
from megarl.algorithms.registry import train
from megarl.batch.balance import QWEN2_5_7B
from megarl.batch.sample_table import SampleTable
from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.data.run_prompts import RunPrompts
from megarl.data.sampler import PromptOrder
from megarl.groups.auxiliary_models import AuxiliaryModels
from megarl.placement.rank_grid import RankGrid
from megarl.run.events import EventLog
from megarl.run.rl_run import RLRun
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.startup import Startup

GROUP_SIZE = 8

DISPATCHES = 3
"""Measured dispatches, of which the median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a run."""

    ranks: int
    trajectories: int
    replicas: int
    """Number of data-parallel replicas."""
    rollout_workers: int = 64
    mini_batches: int = 2
    max_tokens: int = 16384
    """Largest number of tokens in a micro-batch."""
    steps: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReport:
    """Costs of the controller in one step: medians over steps after the first one."""

    ranks: int
    trajectories: int
    replicas: int
    train_call_cpu_seconds: float
    """CPU of `train_policy` without the calls of the ranks: request, micro-batch plan, one stored value per replica."""
    step_cpu_seconds: float
    """CPU of a step from its prompts to its metrics, without the calls of the ranks."""
    rank_calls_cpu_seconds: float
    """CPU of one call of each rank with a reference as argument, and of waiting for the answers."""
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
    cpu_seconds_by_phase: dict[str, float]
    peer_dispatch_seconds: float | None = None
    """verl's time for the same: its controller collects the samples and dispatches them."""
    peer_send_seconds: float | None = None
    """The part after the controller has collected them."""
    peer_dispatch_cpu_seconds: float | None = None
    """CPU of verl's controller in `peer_dispatch_seconds`."""
    ratio_dispatch: float | None = None
    """`peer_dispatch_seconds` over `dispatch_seconds`."""


class MeasuredRun(RLRun):
    """A run that measures the CPU time of this process, all of its threads, by step and by method."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cpu_seconds: list[dict[str, float]] = []
        """By step, method -> seconds."""
        self.step_seconds: list[float] = []
        self.rss_after_first_step = 0

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


MEASURED_METHODS = ("sample", "estimate", "train_policy", "finish_step")
for _name in MEASURED_METHODS:
    setattr(MeasuredRun, _name, _measured_method(_name))


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


def measure(work: Workload, folder: Path, prompt_bytes: float) -> ControllerReport:
    """Run some steps in this process, which is connected to Ray, and return their costs."""
    prompts_per_step = work.trajectories // GROUP_SIZE
    config = RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "prompts.jsonl")},
            "reward": {"terms": {"match": {"type": "numeric"}}},
            "algorithm": {
                "type": "grpo",
                "prompts_per_step": prompts_per_step,
                "group_size": GROUP_SIZE,
                "num_mini_batches": work.mini_batches,
                "kl_loss": None,
            },
            "trainer": {
                "steps": work.steps,
                "max_tokens_per_micro_batch": work.max_tokens,
                "parallel": {"tp": work.ranks // work.replicas},
                "offload": {"optimizer": False, "gradients": False, "weights": False},
            },
            "placement": {"device": "cpu", "slots_per_node": 8, "nodes": max(8, work.ranks // 8)},
            "rollout": {"workers": work.rollout_workers, "max_new_tokens": 2000, "replicas": 64},
            "tracking": {"tensorboard": False},
        }
    )
    grid = RankGrid(tp=work.ranks // work.replicas, dp=work.replicas)
    cluster = FakeCluster.start(config, grid, QWEN2_5_7B)
    prompts = [
        Prompt(prompt_id=f"p{i}", text="x" * 400, token_ids=(1,) * 100, row={"question": "x" * 400})
        for i in range(prompts_per_step)
    ]
    nothing: Any = AuxiliaryModels(trained={}, frozen={}, dedicated=frozenset())
    fakes: dict[str, Any] = {"trainer": cluster.trainer, "rollout": cluster.rollout, "weights": cluster.weights}
    order = PromptOrder(len(prompts), config.seed, config.data.shuffle)
    run_prompts = RunPrompts(training=prompts, order=order)
    run = MeasuredRun(
        config, EventLog(), PhaseTimer(), Startup(time.time()), models=nothing, prompts=run_prompts, **fakes
    )
    cluster.call_ranks(work.replicas)
    rank_calls = [cluster.call_ranks(work.replicas) for _ in range(3)]
    rss_before = anonymous_bytes()
    train(run)
    rank_calls += [cluster.call_ranks(work.replicas) for _ in range(2)]
    request = cluster.trainer.last_request
    dispatch = Cost.median([cluster.dispatch(request) for _ in range(DISPATCHES)])
    run.finish()
    cluster.rollout.shutdown()
    calls = Cost.median(rank_calls)
    later = run.cpu_seconds[1:]
    median = {name: statistics.median(step[name] for step in later) for name in later[0]}
    return ControllerReport(
        ranks=work.ranks,
        trajectories=work.trajectories,
        replicas=work.replicas,
        train_call_cpu_seconds=max(0.0, median["train_policy"] - calls.cpu_seconds),
        step_cpu_seconds=max(0.0, median["step"] - calls.cpu_seconds),
        rank_calls_cpu_seconds=calls.cpu_seconds,
        rank_calls_seconds=calls.seconds,
        rss_mb=(run.rss_after_first_step - rss_before) / 1e6,
        prompt_bytes=prompt_bytes,
        step_seconds=statistics.median(run.step_seconds[1:]),
        dispatch_seconds=dispatch.seconds,
        dispatch_cpu_seconds=dispatch.cpu_seconds,
        fetched_per_used=fetched_per_used(request, grid),
        tokens_per_trajectory=round(
            sum(SampleTable.of(batch.samples).num_tokens for batch in request.mini_batches) / work.trajectories
        ),
        cpu_seconds_by_phase=median,
    )
