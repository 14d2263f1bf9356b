"""Fake trainer ranks, rollout workers and engines in a few Ray actors, to which the product's groups send their calls.

Thousands of ranks share `NUM_PROCESSES` processes: a controller calls each rank as it calls one with a process of its
own. What a rank receives, and what it returns, has the sizes of a run; nothing is generated or trained.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import ray

from megarl.batch.balance import QWEN2_5_7B
from megarl.batch.packed_trajectories import PackedTrajectories
from megarl.batch.sample_table import SampleTable
from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.config.trainer import OffloadConfig
from megarl.groups.rollout_actor import RolloutActor
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.rollout_workers import RolloutWorkers
from megarl.groups.sync_update import PushReport
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.request_split import plan_replicas, split_by_dp, train_dispatch
from megarl.megatron.requests import TrainRequest, TrainStats
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.megatron.training.samples import StepSamples, payloads_by_index
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.planning.strategy import SyncStats
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize
from megarl.supervision.liveness_probe import LIVENESS_GROUP
from megarl.supervision.restart_budget import RestartBudget
from megarl.workers.failures import wait_all
from megarl.workers.group import WorkerGroup
from megarl.workers.worker_host import AsyncWorkerHost, WorkerHost

NUM_PROCESSES = 2
"""Ray actors that stand in for all trainer ranks, and as many for all rollout workers."""

PROMPT_TOKENS = 100
MAX_RESPONSE_TOKENS = 2000


class Cost(NamedTuple):
    """Time, and CPU time of all threads of this process."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def median(cls, costs: Sequence[Cost]) -> Cost:
        """Return the median of the times, and that of the CPU times."""
        return cls(*map(statistics.median, zip(*costs, strict=True)))


class Stopwatch:
    """Measures the cost since it was created."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Cost:
        """Return the cost so far."""
        return Cost(time.perf_counter() - self._began, time.process_time() - self._cpu)


class FakeTrainer:
    """Stands in for the Megatron ranks of a process: receives their requests."""

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Return metrics as a rank does."""
        return TrainStats(metrics={f"metric_{i}": 0.0 for i in range(16)}, num_tokens=1)

    def hold(self, request: TrainRequest) -> int:
        """Return the number of samples in the payloads of the request, which this rank then holds."""
        return sum(map(len, StepSamples.fetch(request).trajectories.values()))

    def answer(self, argument: object) -> None:
        """Accept a call of `call_ranks`."""


class FakeRolloutWorker:
    """Stands in for a rollout worker: returns groups of random lengths; estimates as the product's worker does."""

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, PackedTrajectories]:
        """Return a group whose arrays have the sizes of a run, so that they go to the object store."""
        rng = np.random.default_rng([*job.seed, job.group_id])
        lengths = rng.integers(MAX_RESPONSE_TOKENS // 2, MAX_RESPONSE_TOKENS, job.num_samples)
        trajectories = [
            _fake_trajectory(job, int(n), float(reward))
            for n, reward in zip(lengths, rng.integers(0, 2, job.num_samples), strict=True)
        ]
        summary = GroupSummary(
            group_id=job.group_id,
            prompt_id=job.prompt.prompt_id,
            trajectories=tuple(map(summarize, trajectories)),
            generation_seconds=1.0,
            scoring_seconds=0.1,
        )
        return summary, PackedTrajectories.of(trajectories)

    estimate, whiten = RolloutActor.estimate, RolloutActor.whiten
    join_values = staticmethod(RolloutActor.join_values)

    async def record(self, *arguments: object) -> None:
        """Receive the rollouts that a worker writes to disk."""

    async def shutdown(self) -> None:
        """Close the worker, which holds nothing."""


def _fake_trajectory(job: GroupJob, response: int, reward: float) -> Trajectory:
    n = PROMPT_TOKENS + response
    mask = np.arange(n) >= PROMPT_TOKENS
    return Trajectory(
        prompt_id=job.prompt.prompt_id,
        group_id=job.group_id,
        token_ids=np.zeros(n, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.where(mask, 1, -1).astype(np.int32),
        rewards={"match": reward},
        reward=reward,
    )


@dataclass
class FakeProcesses:
    """Stands in for `WorkerProcesses` with one process per rank."""

    actors: list[ray.actor.ActorHandle]
    name: str = "trainer"


class FakeSupervisor:
    """Stands in for the supervision of engines that never fail."""

    def __init__(self, config: RunConfig, replicas: int) -> None:
        self.restart_budget = RestartBudget(config.recovery, lambda text: None)
        self.serving = list(range(replicas))

    def poll(self) -> None:
        """Check the fake engines, which are never lost."""

    def refs(self) -> list[Any]:
        """Return nothing to wait for."""
        return []


class FakeEngines:
    """Stands in for `EngineGroup`."""

    def __init__(self, config: RunConfig) -> None:
        self.supervisor = FakeSupervisor(config, config.rollout.replicas)
        self._engines = [SimpleNamespace(name=f"engine {i}") for i in range(config.rollout.replicas)]

    def remote_engines(self) -> list[Any]:
        """Return the same handles at each call."""
        return self._engines

    def name(self, replica: int) -> str:
        """Return the engine's name."""
        return f"engine {replica}"

    def first_completion_time(self) -> float:
        """Return the time now."""
        return time.time()


class FakeRolloutWorkers(RolloutWorkers):
    """Rollout workers that share a few processes."""

    def _launch(self, index: int) -> ray.actor.ActorHandle:
        if not hasattr(self, "_hosts"):
            actor = ray.remote(concurrency_groups={LIVENESS_GROUP: 1})(AsyncWorkerHost)
            options = actor.options(num_cpus=0, max_concurrency=10_000)
            self._hosts = [options.remote({}) for _ in range(min(NUM_PROCESSES, self._config.rollout.workers))]
        return self._hosts[index % len(self._hosts)]

    def _build(self, worker: ray.actor.ActorHandle) -> ray.ObjectRef:
        return worker.build.remote(FakeRolloutWorker, (), {}, time.time())


@dataclass
class FakeWeightSync:
    """Stands in for the weights on the engines, whose cost `benchmarks.reshard.scale` measures."""

    policy_version: int = -1

    def select(self, model: str | None) -> bool:
        """Return that the engines hold the weights of the policy, the only model."""
        assert model is None
        return False

    def mark_outdated(self, model: str | None) -> None:
        """Do nothing: each step pushes."""

    def push(self, policy_version: int) -> PushReport:
        """Return the report of a push that moved one byte."""
        self.policy_version = policy_version
        stats = SyncStats(bytes_sent=1, bytes_received=1, bytes_delivered=0, buckets=1, peak_extra_bytes=0)
        return PushReport(stats=stats, seconds={}, bytes_moved=1)


class RecordingTrainerGroup(TrainerGroup):
    """Keeps the last training request."""

    last_request: TrainRequest

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Train, and keep the request."""
        self.last_request = request
        return super().train_step(request)


@dataclass
class FakeCluster:
    """The groups of a run on fake processes."""

    trainer: RecordingTrainerGroup
    rollout: RolloutGroup
    actors: list[ray.actor.ActorHandle]
    """The actor of each rank."""
    weights: FakeWeightSync = field(default_factory=FakeWeightSync)

    @classmethod
    def start(cls, config: RunConfig, grid: RankGrid, cost: Any) -> FakeCluster:
        """Start the fake processes and the groups on them."""
        hosts = [ray.remote(WorkerHost).options(num_cpus=0).remote({}) for _ in range(NUM_PROCESSES)]
        building = [host.build.remote("trainer", FakeTrainer, (), {}, time.time()) for host in hosts]
        wait_all(building, what="start", names=dict.fromkeys(building, "trainer"))
        # consecutive ranks share a process, as they share a node: the first ranks of replicas are in all processes
        processes: Any = FakeProcesses([hosts[rank * NUM_PROCESSES // grid.size] for rank in range(grid.size)])
        offload = OffloadConfig(optimizer=False, gradients=False, weights=False)
        engines: Any = FakeEngines(config)
        rollout = RolloutGroup(config, engines, FakeRolloutWorkers(config, engines))
        rollout.start()
        group: WorkerGroup[TrainerWorker] = WorkerGroup("trainer", processes, grid)
        return cls(RecordingTrainerGroup(group, cost=cost, offload_config=offload), rollout, processes.actors)

    def call_ranks(self, dp: int) -> Cost:
        """Return the cost of a call of each rank with a reference to a stored value, of which each replica has one."""
        watch = Stopwatch()
        stored = [ray.put(bytes(1024)) for _ in range(dp)]
        actors = self.actors
        per_replica = len(actors) // dp
        refs = [actor.invoke.remote("trainer", "answer", stored[i // per_replica], 0) for i, actor in enumerate(actors)]
        wait_all(refs, what="answer", names={ref: f"rank {i}" for i, ref in enumerate(refs)})
        return watch.read()

    def dispatch(self, request: TrainRequest) -> Cost:
        """Return the cost from a training request until each rank holds its samples, the plan included."""
        plan_replicas.cache_clear()
        train: Any = train_dispatch(QWEN2_5_7B)
        dispatch, grid = replace(train, collect=lambda held, _: held), self.trainer.grid
        method: Any = FakeTrainer.hold
        watch = Stopwatch()
        held: Any = self.trainer.group.call(method, request, dispatch=dispatch)
        cost = watch.read()
        num_samples = sum(len(batch.samples) for batch in request.mini_batches)
        assert sum(held) == num_samples * grid.size // grid.dp, f"{sum(held)} samples of {num_samples}"
        return cost


def fetched_per_used(request: TrainRequest, grid: RankGrid) -> float:
    """Return the tokens of the objects that the replicas fetch over the tokens that they train on."""
    tokens_by_object: Counter[Any] = Counter()
    payloads = payloads_by_index(request)
    for batch in request.mini_batches:
        table = SampleTable.of(batch.samples)
        for number, num_tokens in zip(table.keys_N2[:, 0].tolist(), table.num_tokens_N.tolist(), strict=True):
            tokens_by_object[payloads[number].refs] += num_tokens
    by_replica = split_by_dp(request, grid)[:: grid.size // grid.dp]
    objects = [{payload.refs for payload in payloads_by_index(replica).values()} for replica in by_replica]
    return sum(tokens_by_object[refs] for of_replica in objects for refs in of_replica) / tokens_by_object.total()
