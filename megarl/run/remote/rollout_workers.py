"""The processes of the rollout workers, restarted if they die or hang, and the groups that each of them samples.

It also notifies them of engines that are lost or restarted.

    8 engines, 2 workers     share 0: worker 0, engines 0 2 4 6;     share 1: worker 1, engines 1 3 5 7
    2 engines, 4 workers     share 0: workers 0 2, engine 0;         share 1: workers 1 3, engine 1

No two workers ask the same engine for its partial outputs, as long as there are enough engines. A group whose engine is
lost continues on one that its worker chooses (`EnginePool`).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.checkpoint.run_lock import find_claim
from megarl.cluster.placement.assign import nodes_for_light_workers
from megarl.cluster.placement.hardware import inline_environment
from megarl.cluster.process.process_start import StartupTiming
from megarl.cluster.workers.failures import pause, raise_failure, run_abort_check, to_megarl_error, wait_all, wait_any
from megarl.cluster.workers.worker_host import AsyncWorkerHost
from megarl.config import RunConfig
from megarl.errors import LostEngineError, MegarlError, WorkerError
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.remote.engine_group import EngineGroup
from megarl.run.remote.remote_engine import RemoteEngine
from megarl.run.remote.rollout_actor import RolloutActor
from megarl.run.supervision.engine_supervisor import LIVENESS_GROUP, POLL_INTERVAL_SECONDS, WorkerLivenessProbe
from megarl.run.supervision.restart_budget import RestartBudget, name_some


@dataclass(slots=True, eq=False)
class EngineLoad:
    """The samples of an engine's processes, from their start to their loss."""

    engine: int
    turn: int
    """Increases with each group that any engine gets: of two equally loaded engines, the lower one is next."""
    outstanding: int = 0
    """Number of samples in flight on the engine, of all workers and streams."""
    is_serving: bool = True


@dataclass(frozen=True, slots=True)
class AssignedJob:
    """A job for the worker that it was assigned to."""

    job: GroupJob
    load: EngineLoad | None
    """Of the engine that the job names; None: it names none that serves."""


class _LoadHeap:
    """Engines by their load; an entry is outdated if the engine has been lost, or has another load since."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, EngineLoad]] = []
        self._num_engines = 0

    def add(self, load: EngineLoad) -> None:
        """Add an engine, or its new load."""
        heapq.heappush(self._entries, (load.outstanding, load.turn, load))
        if len(self._entries) > 64 + 4 * self._num_engines:
            valid = {id(load): load for *_, load in self._entries if load.is_serving}
            self._entries = [(load.outstanding, load.turn, load) for load in valid.values()]
            self._num_engines = len(valid)
            heapq.heapify(self._entries)

    def least(self) -> EngineLoad | None:
        """Return the serving engine with the fewest samples; None if none serves."""
        while self._entries:
            outstanding, turn, load = self._entries[0]
            if load.is_serving and (outstanding, turn) == (load.outstanding, load.turn):
                return load
            heapq.heappop(self._entries)
        return None


class EngineLoads:
    """The samples in flight on each engine of a run, over all of its streams.

    With S the smaller number of workers and engines, share s has the workers s, s + S, ..., which send requests to the
    engines s, s + S, ... only.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._turns = itertools.count()
        self._loads: list[EngineLoad | None] = []
        """By engine; None for one that does not serve."""
        self._all = _LoadHeap()
        self._by_share: list[_LoadHeap] = []
        self._workers_by_share: list[Iterator[int]] = []
        """The workers of each share in turn, again and again."""
        self._all_workers = itertools.cycle(range(num_workers))

    @property
    def outstanding(self) -> list[int]:
        """Number of samples in flight on each engine; 0 for one that does not serve."""
        return [0 if load is None else load.outstanding for load in self._loads]

    def start(self, serving: Sequence[bool]) -> None:
        """Begin with engines without samples, of which those serve for which `serving` is true."""
        self._loads = [None] * len(serving)
        num_shares = min(len(serving), self._num_workers)
        self._by_share = [_LoadHeap() for _ in range(num_shares)]
        self._workers_by_share = [itertools.cycle(range(s, self._num_workers, num_shares)) for s in range(num_shares)]
        for engine, serves in enumerate(serving):
            self.replace(engine, serves=serves)

    def replace(self, engine: int, *, serves: bool) -> None:
        """Forget the samples of an engine that was lost or restarted; `serves`: whether it takes new ones."""
        if (lost := self._loads[engine]) is not None:
            lost.is_serving = False
        self._loads[engine] = load = EngineLoad(engine, next(self._turns)) if serves else None
        self._change(load, 0)

    def assign(self, jobs: Sequence[GroupJob], max_per_block: int) -> dict[int, list[AssignedJob]]:
        """Return the jobs by the index of their workers, with the engines that they name.

        Each job gets the engine with the fewest samples. Blocks of up to `max_per_block` adjacent jobs have the same
        worker, smaller ones if some workers of a share would get none. A job that names an engine keeps it.
        """
        free = [job for job in jobs if job.engine is None]
        by_worker: dict[int, list[AssignedJob]] = {}
        if self._all.least() is None:
            for job in free:
                by_worker.setdefault(next(self._all_workers), []).append(AssignedJob(job, None))
            free = []
        unassigned = iter(free)
        for share, block in self._in_turn(self._choose(free), max_per_block):
            own = by_worker.setdefault(next(self._workers_by_share[share]), [])
            for (load, num_samples), job in zip(block, unassigned, strict=False):
                if job.num_episodes != num_samples:
                    self._change(load, job.num_episodes - num_samples)
                own.append(AssignedJob(job, load))
        for job in jobs:
            if job.engine is not None:
                worker = next(self._workers_by_share[job.engine % len(self._by_share)])
                by_worker.setdefault(worker, []).extend(self.assign_to(worker, [job]))
        return by_worker

    def assign_to(self, worker: int, jobs: Iterable[GroupJob]) -> list[AssignedJob]:
        """Return jobs for a worker: each names the least loaded engine of its share, unless it names one already."""
        heap = self._by_share[worker % len(self._by_share)]
        assigned = []
        for job in jobs:
            load = heap.least() if job.engine is None else self._loads[job.engine]
            self._change(load, job.num_episodes)
            assigned.append(AssignedJob(job, load))
        return assigned

    def release(self, *assigned: AssignedJob) -> None:
        """Subtract the samples of jobs that have finished, are cancelled, or are assigned again."""
        loads, num_samples = dict[int, EngineLoad | None](), Counter[int]()
        for each in assigned:
            loads[id(each.load)] = each.load
            num_samples[id(each.load)] += each.job.num_episodes
        for key, load in loads.items():
            self._change(load, -num_samples[key])

    def _change(self, load: EngineLoad | None, num_samples: int) -> None:
        """Add samples to an engine that serves; no-op without one."""
        if load is None or not load.is_serving:
            return
        self._add_samples(load, num_samples)
        self._by_share[load.engine % len(self._by_share)].add(load)

    def _add_samples(self, load: EngineLoad, num_samples: int) -> None:
        """Add samples to an engine that serves; its share must get the new load before the share is used."""
        load.outstanding += num_samples
        if num_samples > 0:
            load.turn = next(self._turns)
        self._all.add(load)

    def _choose(self, jobs: Sequence[GroupJob]) -> dict[int, list[tuple[EngineLoad, int]]]:
        """Return, by share, an engine for each job, and the samples that it was given."""
        chosen: dict[int, list[tuple[EngineLoad, int]]] = {}
        for job in jobs:
            load = self._all.least()
            assert load is not None, "no engine serves"
            self._add_samples(load, job.num_episodes)
            chosen.setdefault(load.engine % len(self._by_share), []).append((load, job.num_episodes))
        for share, own in chosen.items():
            for load in {id(load): load for load, _ in own}.values():
                self._by_share[share].add(load)
        return chosen

    def _in_turn[T](self, by_share: dict[int, list[T]], max_per_block: int) -> Iterator[tuple[int, Sequence[T]]]:
        """Yield blocks of each share's items, those of all shares in turn."""
        num_workers = self._num_workers // max(1, len(self._by_share))
        blocks = {share: deque(_split(items, num_workers, max_per_block)) for share, items in by_share.items()}
        while blocks:
            for share, left in list(blocks.items()):
                yield share, left.popleft()
                if not left:
                    del blocks[share]


def _split[T](items: Sequence[T], num_workers: int, max_per_block: int) -> Iterator[Sequence[T]]:
    """Yield blocks of about the same size, equally many for each worker; single items if there are few."""
    num_blocks = len(items)
    if len(items) >= 2 * num_workers:
        num_blocks = num_workers * ceil(len(items) / (num_workers * max_per_block))
    first = 0
    for block in range(num_blocks):
        last = first + ceil((len(items) - first) / (num_blocks - block))
        yield items[first:last]
        first = last


WORKER_DEATHS = (RayActorError, ActorUnschedulableError)
"""Errors of a call to a worker that has died, or whose node was lost before the worker was created."""

ABORT_SECONDS = 5.0
"""How long to wait for engines to abort the requests of a lost worker; one that hangs is restarted."""

SHUTDOWN_SECONDS = 30.0
"""How long workers may take to close their rewards before they are killed."""


class RolloutWorkers:
    """The rollout workers of a run, by index. A restarted worker has another Ray actor under the same index."""

    def __init__(
        self,
        config: RunConfig,
        engines: EngineGroup | None,
        restart_budget: RestartBudget,
        worker_class: type[RolloutActor] = RolloutActor,
    ) -> None:
        """Request the processes.

        Args:
            engines: None: the workers read all groups from a journal.
            worker_class: class of the workers, built with the arguments of `RolloutActor`.
        """
        self._config, self._worker_class = config, worker_class
        self._start_seconds = config.placement.start_timeout_seconds
        self._engines, self.restart_budget = engines, restart_budget
        self.requested_at = time.time()
        """Unix time at which the processes were requested from Ray."""
        self._nodes = nodes_for_light_workers()
        self._actors = [self.launch(index) for index in range(config.rollout.workers)]
        self._probes = [self._make_probe(actor) for actor in self._actors]
        self._known_engines: list[RemoteEngine | None] = []
        """Handle of each engine that the workers currently use, by replica; None for an engine that does not serve."""
        self.engine_loads = EngineLoads(len(self._actors))
        """The samples of all streams on these engines."""

    def __len__(self) -> int:
        return len(self._actors)

    def __getitem__(self, index: int) -> ray.actor.ActorHandle:
        return self._actors[index]

    def start(self) -> None:
        """Build the workers; the engines must have started. Raises as `restart` does."""
        self._known_engines = [None] if self._engines is None else self._engines.remote_engines()
        self.engine_loads.start([engine is not None for engine in self._known_engines])
        self.restart({index: self._build(actor) for index, actor in enumerate(self._actors)})

    def startup_timing(self) -> list[StartupTiming]:
        """Return the startup timing of each worker's process."""
        refs = [actor.startup_timing.remote() for actor in self._actors]
        return wait_all(refs, what="start", names=self.names(refs))

    def actors(self) -> dict[str, ray.actor.ActorHandle]:
        """Return the Ray actors by their names in messages."""
        return {f"rollout worker {index}": actor for index, actor in enumerate(self._actors)}

    def shutdown(self) -> None:
        """Let the workers close their rewards, then kill them; they must not be used afterwards."""
        refs = [actor.stop.remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)
        for actor in self._actors:
            ray.kill(actor)

    def call_all(self, method: str) -> None:
        """Call a method of all workers without waiting; a worker that is dead is found and restarted elsewhere."""
        for actor in self._actors:
            actor.invoke.remote(method)

    def call_each(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], *, num_returns: int
    ) -> dict[int, tuple[Any, list[ray.ObjectRef]]]:
        """Call a method that returns several values, by worker; block until all calls have returned.

        A call whose worker dies is repeated on the restarted one.

        Args:
            arguments: those of each worker that is called, by its index.
            num_returns: number of values that the method returns.

        Returns:
            By worker, the first value, and references to the others.

        Raises:
            MegarlError: as the method, or `restart`.
        """

        def send(index: int) -> list[ray.ObjectRef]:
            refs = self._actors[index].invoke.options(num_returns=num_returns).remote(method, *arguments[index])
            return refs if num_returns > 1 else [refs]

        calls = {index: send(index) for index in arguments}
        waiting = list(calls)
        while waiting:
            self.wait_for({calls[index][0]: index for index in waiting})
            dead = {index: calls[index][0] for index in waiting if self.is_dead(calls[index][0])}
            self.restart(dead)
            calls |= {index: send(index) for index in dead}
            waiting = list(dead)
        names = {refs[0]: f"rollout worker {index}" for index, refs in calls.items()}
        values = wait_all(list(names), what=method, names=names)
        return {index: (value, refs[1:]) for (index, refs), value in zip(calls.items(), values, strict=True)}

    def names(self, refs: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, str]:
        """Return the workers' names in messages, by one call to each."""
        return {ref: f"rollout worker {i}" for i, ref in enumerate(refs)}

    def wait_for(self, calls: Mapping[ray.ObjectRef, int]) -> None:
        """Block until these calls have returned or failed; `calls`: the workers' indices by Ray reference."""
        waiting = list(calls)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_INTERVAL_SECONDS)
            if waiting:
                self.kill_hung({calls[ref] for ref in waiting})

    def kill_hung(self, indices: Iterable[int]) -> None:
        """Kill those of the workers that hang, so that their calls end; raises as `run_abort_check` does."""
        run_abort_check(lambda: sorted(f"rollout worker {index}" for index in indices))
        hung = WorkerLivenessProbe.find_hung({index: self._probes[index] for index in indices})
        if hung:
            seconds = self._config.recovery.engine_stall_seconds
            what, them = f"rollout worker {hung[0]} has", "it"
            if len(hung) > 1:
                what, them = f"rollout workers {name_some(list(map(str, hung)))} have", "them"
            self.restart_budget.notify(
                f"{what} not answered a ping for {seconds:g} s (recovery.engine_stall_seconds); killing {them}"
            )
        for index in hung:
            ray.kill(self._actors[index])
            self._probes[index] = self._make_probe(self._actors[index])  # its death is reported with a delay

    def abort_groups(self, request_ids: Sequence[str]) -> None:
        """Abort the requests that a lost worker has left on the engines, by the request ids of its groups.

        Blocks until the engines have confirmed it, as the same ids may be sent again, for at most `ABORT_SECONDS`.
        """
        engines = [engine for engine in self._known_engines if isinstance(engine, RemoteEngine)]
        refs = [engine.handle.invoke.remote("abort_groups", request_ids) for engine in engines]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=ABORT_SECONDS)

    def poll_engines(self) -> None:
        """Poll the engines and notify the workers of those that were lost or restarted.

        Raises as `EngineSupervisor.poll` does.
        """
        if self._engines is None:
            return
        self._engines.supervisor.poll()
        engines = self._engines.remote_engines()
        changes = {
            number: LostEngineError(f"{self._engines.name(number)} was lost") if engine is None else engine
            for number, (engine, known) in enumerate(zip(engines, self._known_engines, strict=True))
            if engine is not known
        }
        self._known_engines = engines
        for number in changes:
            self.engine_loads.replace(number, serves=engines[number] is not None)
        if changes:
            for actor in self._actors:
                actor.invoke.remote("update_engines", changes)

    def engine_refs(self) -> Sequence[ray.ObjectRef]:
        """Return the calls that end when an engine is lost or has been restarted."""
        return () if self._engines is None else self._engines.supervisor.refs()

    def is_dead(self, ref: ray.ObjectRef) -> bool:
        """Return whether the finished call `ref` failed because its worker's process died."""
        return _find_death(ref) is not None

    def restart(self, calls: Mapping[int, ray.ObjectRef]) -> None:
        """Wait for the call to each of these workers, and restart those whose calls fail because they died.

        All start at the same time, and again as long as they die.

        Args:
            calls: by the worker's index.

        Raises:
            MegarlError: a call failed for another reason.
            WorkerError: a worker must not be restarted, or did not start in time.
        """
        waiting = {call: index for index, call in calls.items()}
        while waiting:
            names = {call: f"rollout worker {index}" for call, index in waiting.items()}
            try:
                wait_any(list(waiting), what="rollout worker start", names=names, timeout=self._start_seconds)
            except WorkerError:
                for index in waiting.values():
                    ray.kill(self._actors[index])  # otherwise it would later pass as built
                raise
            ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            deaths = {}
            for call in ended:
                name, index = names[call], waiting.pop(call)
                if (error := _find_death(call)) is not None:
                    deaths[index] = to_megarl_error(error, what="rollout", name=name)
                else:
                    raise_failure(call, what="rollout worker start", name=name)
            if deaths:
                waiting |= self._replace(deaths)

    def _replace(self, deaths: Mapping[int, MegarlError]) -> dict[ray.ObjectRef, int]:
        """Start other processes for workers that died; return the calls that build them, with their indices."""
        causes = {f"rollout worker {index}": error for index, error in deaths.items()}
        budget = self.restart_budget
        waits = budget.spend_each("rollout worker", causes, budget.step, num_processes=len(self._actors))
        pause(max(waits))
        self._nodes = nodes_for_light_workers()
        for index in deaths:
            ray.kill(self._actors[index])  # Ray may only have lost contact with it
            self._actors[index] = self.launch(index)
            self._probes[index] = self._make_probe(self._actors[index])
        return {self._build(self._actors[index]): index for index in deaths}

    def launch(self, index: int) -> ray.actor.ActorHandle:
        """Request the process of a rollout worker on its node, and begin to build the worker."""
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        node = self._nodes[index % len(self._nodes)]
        here = NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = ray.remote(concurrency_groups={LIVENESS_GROUP: 1})(AsyncWorkerHost)
        inline = inline_environment()  # usually nothing: a process with an environment of its own starts later
        options = actor.options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy=here,
            runtime_env={"env_vars": inline} if inline else None,
        )
        worker = options.remote(environment)
        # imports take seconds and overlap with the start of the engines
        worker.preimport.remote(self._worker_class, time.time())
        return worker

    def _make_probe(self, actor: ray.actor.ActorHandle) -> WorkerLivenessProbe:
        return WorkerLivenessProbe(actor, self._config.recovery.engine_stall_seconds)

    def _build(self, actor: ray.actor.ActorHandle) -> ray.ObjectRef:
        arguments = self._config, self._known_engines, find_claim(self._config.run_dir)
        return actor.build.remote(self._worker_class, arguments, {}, time.time())


def _find_death(ref: ray.ObjectRef) -> RayError | None:
    """Return the error of a finished call if it failed because its worker's process died."""
    try:
        ray.get(ref)
    except WORKER_DEATHS as error:
        return error
    except RayError:
        return None
    return None
