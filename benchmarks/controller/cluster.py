"""Fake trainer ranks, rollout workers and engines in a few Ray actors, to which the product's groups send their calls.

Thousands of ranks share `NUM_PROCESSES` processes: a controller calls each rank as it calls one with a process of its
own. What a rank receives, and what it returns, has the sizes of a run; nothing is generated, trained or written.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import ray

from megarl.batch.balance import QWEN2_5_7B
from megarl.batch.pack import SampleTable
from megarl.batch.packed_trajectories import PackedTrajectories
from megarl.batch.trajectory import Trajectory
from megarl.cluster.placement.pool import Slot
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import Dispatch
from megarl.cluster.workers.failures import wait_all
from megarl.cluster.workers.group import (
    CallRelay,
    RankCall,
    Relay,
    RemoteCall,
    WorkerGroup,
    WorkerProcesses,
    ranks_by_relay,
)
from megarl.cluster.workers.stragglers import CallLog
from megarl.cluster.workers.worker_host import AsyncWorkerHost, WorkerHost
from megarl.config import RunConfig
from megarl.config.trainer import OffloadConfig
from megarl.engines.engine import EngineUpdate, UpdateReport
from megarl.megatron.request_samples import StepSamples, payloads_by_index, plan_replicas, split_by_dp, train_dispatch
from megarl.megatron.requests import (
    OffloadStats,
    PushRequest,
    PushResult,
    SavedShard,
    SaveRequest,
    SaveStats,
    TrainRequest,
    TrainStats,
)
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.commit_decision import CommitSpec
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize
from megarl.run.remote.engine_group import EngineHandles, StartedEngine
from megarl.run.remote.remote_engine import RemoteEngine
from megarl.run.remote.rollout_actor import RolloutActor
from megarl.run.remote.rollout_group import RolloutGroup
from megarl.run.remote.rollout_workers import RolloutWorkers
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.supervision.engine_supervisor import LIVENESS_GROUP, EngineSupervisor
from megarl.run.supervision.restart_budget import RestartBudget
from megarl.run.sync.weight_sync import PushReport

NUM_PROCESSES = 2
"""Ray actors that stand in for all trainer ranks, and as many each for their relays, all rollout workers and all
engines."""

RANKS_PER_NODE = 8

PROMPT_TOKENS = 100

CALL_SECONDS = 600.0
"""How long a call may take."""


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

    def __init__(self, num_ranks: int = 1, slow_rank_seconds: float = 0.0) -> None:
        """Args:
        num_ranks: of the process.
        slow_rank_seconds: how long one of them, which the others wait for, trains in a step.
        """
        self._num_ranks, self._slow_rank_seconds = num_ranks, slow_rank_seconds
        self._num_trained = 0
        self._saved = -1

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Return metrics as a rank does."""
        if self._num_trained % self._num_ranks == 0:
            time.sleep(self._slow_rank_seconds)
        self._num_trained += 1
        metrics = {f"metric_{i}": 0.0 for i in range(16)}
        return TrainStats(metrics=metrics, num_tokens=1, is_save_written=self.is_save_written(None))

    def offload(self, kinds: OffloadConfig) -> OffloadStats:
        """Return that one byte was moved."""
        return OffloadStats(device_bytes=1, host_bytes=1)

    def push_weights(self, request: PushRequest | None) -> PushResult:
        """Return the result of a rank that has sent one byte."""
        return PushResult(stats=ONE_BYTE)

    def begin_save(self, request: SaveRequest) -> SaveStats:
        """Begin a save that is written during the next training step."""
        self._saved = self._num_trained
        return SaveStats(staging_bytes=1, bytes=1, seconds=0.0)

    def is_save_written(self, _: None) -> bool:
        """Return whether a rank of the process has trained since the save."""
        return self._num_trained > self._saved

    def wait_save_written(self, _: None) -> None:
        """Return at once."""

    def finish_save(self, _: None) -> SavedShard:
        """Return that no file was written."""
        return SavedShard(files=(), write_seconds=0.0)

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
        longest = job.sampling.max_new_tokens
        lengths = rng.integers(longest // 2, longest, job.num_samples)
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


ONE_BYTE = SyncStats(bytes_sent=1, bytes_received=1, bytes_delivered=0, buckets=1, peak_extra_bytes=0)


class FakeEngine:
    """Stands in for the engines of a process, in an `AsyncWorkerHost`."""

    async def watch(self) -> None:
        """Return when an engine ends, which is never."""
        await asyncio.Event().wait()

    async def ping(self) -> None:
        """Return that the engine is alive."""

    async def release(self, memory: Sequence[str]) -> None:
        """Accept the call that frees memory."""

    async def resume(self, memory: Sequence[str]) -> None:
        """Accept the call that allocates memory."""

    async def update_weights(self, update: EngineUpdate) -> UpdateReport:
        """Return that the weights were received."""
        return UpdateReport(stats=(), open_seconds=0.0, commit_seconds=0.0)

    async def shutdown(self) -> None:
        """Close the engine, which holds nothing."""


@dataclass(frozen=True, slots=True)
class CountedRelay(Relay):
    """A relay that counts the calls which its ranks get from it, by method."""

    counts: Counter[str]

    def send(self, call: RankCall, arguments: Sequence[Any]) -> Any:
        """Count the calls and send them."""
        self.counts[call.method] += len(self.ranks)
        return Relay.send(self, call, arguments)


class FakeProcesses(WorkerProcesses):
    """Stands in for one process per rank, on nodes of `RANKS_PER_NODE`, each of which has a relay."""

    def __init__(self, hosts: Sequence[Any], num_ranks: int, counts: Counter[str]) -> None:
        """Args:
        hosts: the processes, each of which is that of consecutive ranks.
        counts: gets the number of calls of the ranks, by method.
        """
        self.name, self.call_log = "trainer", CallLog()
        self.actors = [hosts[rank * len(hosts) // num_ranks] for rank in range(num_ranks)]
        relay = CallRelay.actor_class().options(num_cpus=0)
        handles = [relay.remote(dict(enumerate(self.actors))) for _ in hosts]
        by_relay = ranks_by_relay([Slot(i, 1.0, 0.0, str(i // RANKS_PER_NODE), None) for i in range(num_ranks)])
        self.relays = [
            CountedRelay(handles[i * len(handles) // len(by_relay)], tuple(ranks), counts)
            for i, ranks in enumerate(by_relay)
        ]


class FakeEngines(EngineHandles):
    """Stands in for `EngineGroup`: engines in a few processes, with the supervisor of the product."""

    def __init__(self, config: RunConfig) -> None:
        actor = ray.remote(AsyncWorkerHost).options(num_cpus=0, max_concurrency=10_000)
        self._hosts = [actor.remote({}) for _ in range(NUM_PROCESSES)]
        building = [host.build.remote(FakeEngine, (), {}, time.time()) for host in self._hosts]
        wait_all(building, what="start", names=dict.fromkeys(building, "engines"))
        numbers = range(config.rollout.replicas)
        started = [StartedEngine(self._hosts[i % NUM_PROCESSES], self.name(i), ()) for i in numbers]
        no_pool: Any = None
        super().__init__(started, [()] * len(started), no_pool, CALL_SECONDS)
        self._remote_engines = [RemoteEngine(engine.handle, engine.name) for engine in started]
        self.supervisor = EngineSupervisor(
            self, len(started), config, RestartBudget(config.recovery, lambda text: None)
        )
        self.supervisor.start()
        self.supervisor.wait_started()

    def remote_engines(self) -> list[RemoteEngine]:
        """Return the same handles at each call."""
        return self._remote_engines

    def name(self, replica: int) -> str:
        """Return the engine's name."""
        return f"engine {replica}"

    def handles(self, replica: int) -> list[ray.actor.ActorHandle]:
        """Return the process of the engine."""
        return [self.engines[replica].handle]

    def has_live_node(self, replica: int) -> bool:
        """Return that no node is lost."""
        return True

    def may_allocate(self) -> bool:
        """Return that there is memory."""
        return True

    def start(self, replica: int) -> ray.ObjectRef:
        """Return the reference of a call that ends once the engine's process has started."""
        return self.engines[replica].handle.invoke.remote("ping")

    def release(self, memory: Sequence[str]) -> None:
        """Call each engine, as before an update."""
        self.call("release", tuple(memory))

    def resume(self, memory: Sequence[str]) -> None:
        """Call each engine, as before a push."""
        self.call("resume", tuple(memory))

    def first_completion_time(self) -> float:
        """Return the time now."""
        return time.time()

    def shutdown(self) -> None:
        """End the processes."""
        for host in self._hosts:
            ray.kill(host)


class FakeRolloutWorkers(RolloutWorkers):
    """Rollout workers that share a few processes."""

    def launch(self, index: int) -> ray.actor.ActorHandle:
        """Start a rollout worker in one of the processes, as `RolloutWorkers.launch`."""
        if not hasattr(self, "_hosts"):
            actor = ray.remote(concurrency_groups={LIVENESS_GROUP: 1})(AsyncWorkerHost)
            options = actor.options(num_cpus=0, max_concurrency=10_000)
            self._hosts = [options.remote({}) for _ in range(min(NUM_PROCESSES, self._config.rollout.workers))]
        return self._hosts[index % len(self._hosts)]

    def _build(self, worker: ray.actor.ActorHandle) -> ray.ObjectRef:
        return worker.build.remote(FakeRolloutWorker, (), {}, time.time())


@dataclass
class FakeModelSync:
    """Makes the calls of a push, one of each rank and engine; `benchmarks.reshard.scale` measures what they carry."""

    trainer: TrainerGroup
    engines: FakeEngines
    is_outdated: bool = False

    def push(self, policy_version: int) -> PushReport:
        """Call ranks and engines at the same time, wait for both, and return the report of a push of one byte."""
        update = EngineUpdate(policy_version=policy_version, commit=CommitSpec("host", 1, "update", 1))
        updating = self.engines.begin("update_weights", update)
        pushing = self.trainer.begin_push(None)
        assert isinstance(pushing, RemoteCall)
        pushing.result_with(updating, CALL_SECONDS)
        updating.result(CALL_SECONDS)
        return PushReport(stats=ONE_BYTE, seconds={}, bytes_moved=1)


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

    processes: FakeProcesses
    trainer: RecordingTrainerGroup
    rollout: RolloutGroup
    engines: FakeEngines
    counts: Counter[str]
    """Number of calls of the ranks, by method."""

    @classmethod
    def start(cls, config: RunConfig, grid: RankGrid, cost: Any, *, slow_rank_seconds: float = 0.0) -> FakeCluster:
        """Start the fake processes and the groups on them."""
        hosts = [ray.remote(WorkerHost).options(num_cpus=0).remote({}) for _ in range(NUM_PROCESSES)]
        counts = Counter[str]()
        processes = FakeProcesses(hosts, grid.size, counts)
        building = [
            host.build.remote(
                "trainer",
                FakeTrainer,
                (processes.actors.count(host), slow_rank_seconds if host is hosts[0] else 0.0),
                {},
                time.time(),
            )
            for host in hosts
        ]
        wait_all(building, what="start", names=dict.fromkeys(building, "trainer"))
        offload = OffloadConfig(optimizer=True, gradients=True, weights=True)
        engines: Any = FakeEngines(config)
        rollout = RolloutGroup(config, engines, FakeRolloutWorkers(config, engines, engines.supervisor.restart_budget))
        rollout.start()
        group: WorkerGroup[TrainerWorker] = WorkerGroup("trainer", processes, grid)
        trainer = RecordingTrainerGroup(group, cost=cost, offload_config=offload)
        return cls(processes=processes, trainer=trainer, rollout=rollout, engines=engines, counts=counts)

    def shutdown(self) -> None:
        """End the processes of rollout workers and engines."""
        self.rollout.shutdown()
        self.engines.shutdown()

    def call_ranks(self) -> Cost:
        """Return the cost of a call of each rank with a kilobyte, of which each replica has its own."""
        watch = Stopwatch()
        answer: Any = FakeTrainer.answer
        self.trainer.group.call(answer, bytes(1024), dispatch=_TO_REPLICAS)
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


def _copy_for_replicas(value: bytes, grid: RankGrid) -> list[bytes]:
    copies = [bytes(bytearray(value)) for _ in range(grid.dp)]
    return [copies[grid.coordinates(rank).dp] for rank in range(grid.size)]


_TO_REPLICAS: Dispatch[bytes, None] = Dispatch(_copy_for_replicas, lambda _, grid: None, by_reference=True)


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


def request_bytes(request: TrainRequest, grid: RankGrid) -> int:
    """Return the size of what the controller stores for the replicas: their requests, with references to groups."""
    context = ray._private.worker.global_worker.get_serialization_context()
    by_replica = split_by_dp(request, grid)[:: grid.size // grid.dp]
    return sum(context.serialize(own).total_bytes for own in by_replica)
