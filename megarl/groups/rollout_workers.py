"""The processes of the rollout workers: starts them, restarts those that die, kills those that hang.

It also notifies them of engines that are lost or restarted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.checkpoint.run_lock import find_claim
from megarl.config import RunConfig
from megarl.errors import LostEngineError, WorkerError
from megarl.groups.engine_group import EngineGroup
from megarl.groups.remote_engine import RemoteEngine
from megarl.groups.rollout_actor import RolloutActor
from megarl.placement.nodes import nodes_for_light_workers
from megarl.process.startup_trace import StartupTiming
from megarl.supervision.liveness_probe import LIVENESS_GROUP, POLL_INTERVAL_SECONDS, WorkerLivenessProbe
from megarl.workers.failures import pause, run_abort_check, to_megarl_error, wait_all, wait_any
from megarl.workers.worker_host import AsyncWorkerHost

WORKER_DEATHS = (RayActorError, ActorUnschedulableError)
"""Errors of a call to a worker that has died, or whose node was lost before the worker was created."""

SHUTDOWN_SECONDS = 30.0
"""How long workers may take to close their rewards before they are killed."""


class RolloutWorkers:
    """The rollout workers of a run, by index. A restarted worker has another Ray actor under the same index."""

    def __init__(
        self, config: RunConfig, engines: EngineGroup, worker_class: type[RolloutActor] = RolloutActor
    ) -> None:
        """Request the processes.

        Args:
            worker_class: class of the workers, built with the arguments of `RolloutActor`.
        """
        self._config, self._worker_class = config, worker_class
        self._start_seconds = config.placement.start_timeout_seconds
        self._engines, self.supervisor = engines, engines.supervisor
        self.requested_at = time.time()
        """Unix time at which the processes were requested from Ray."""
        self._actors = [self._launch(index) for index in range(config.rollout.workers)]
        self._probes = [self._make_probe(actor) for actor in self._actors]
        self._known_engines: list[RemoteEngine | None] = []
        """Handle of each engine that the workers currently use, by replica; None for an engine that does not serve."""

    def __len__(self) -> int:
        return len(self._actors)

    def __getitem__(self, index: int) -> ray.actor.ActorHandle:
        return self._actors[index]

    def start(self) -> None:
        """Build the workers; the engines must have started. Raises as `restart` does."""
        self._known_engines = self._engines.remote_engines()
        for index, building in enumerate([self._build(actor) for actor in self._actors]):
            self.restart(index, building)

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
        for index in calls:
            self.wait_for(calls[index][0], index)
            while self.is_dead(calls[index][0]):
                self.restart(index, calls[index][0])
                calls[index] = send(index)
                self.wait_for(calls[index][0], index)
        names = {refs[0]: f"rollout worker {index}" for index, refs in calls.items()}
        values = wait_all(list(names), what=method, names=names)
        return {index: (value, refs[1:]) for (index, refs), value in zip(calls.items(), values, strict=True)}

    def names(self, refs: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, str]:
        """Return the workers' names in messages, by one call to each."""
        return {ref: f"rollout worker {i}" for i, ref in enumerate(refs)}

    def wait_for(self, ref: ray.ObjectRef, index: int) -> None:
        """Block until this call to a worker has returned or failed."""
        while not ray.wait([ref], timeout=POLL_INTERVAL_SECONDS)[0]:
            self.kill_hung({index})

    def kill_hung(self, indices: Iterable[int]) -> None:
        """Kill those of the workers that hang, so that their calls end; raises as `run_abort_check` does."""
        run_abort_check(sorted(f"rollout worker {index}" for index in indices))
        for index in indices:
            if self._probes[index].is_hung():
                seconds = self._config.recovery.engine_stall_seconds
                self.supervisor.restart_budget.notify(
                    f"rollout worker {index} has not answered a ping for {seconds:g} s "
                    "(recovery.engine_stall_seconds); killing it"
                )
                ray.kill(self._actors[index])
                self._probes[index] = self._make_probe(self._actors[index])  # its death is reported with a delay

    def poll_engines(self) -> bool:
        """Poll the engines and notify the workers of those that were lost or restarted.

        Returns whether an engine was lost or restarted, or none serves. Raises as `EngineSupervisor.poll` does.
        """
        self.supervisor.poll()
        changed = False
        for number, engine in enumerate(self._engines.remote_engines()):
            if engine == self._known_engines[number]:
                continue
            self._known_engines[number] = engine
            changed = True
            lost = LostEngineError(f"{self._engines.name(number)} was lost")
            for actor in self._actors:
                if engine is None:
                    actor.invoke.remote("mark_engine_lost", number, lost)
                else:
                    actor.invoke.remote("replace_engine", number, engine)
        return changed or not self.supervisor.serving

    def is_dead(self, ref: ray.ObjectRef) -> bool:
        """Return whether the finished call `ref` failed because its worker's process died."""
        try:
            ray.get(ref)
        except WORKER_DEATHS:
            return True
        except RayError:
            return False
        return False

    def restart(self, index: int, call: ray.ObjectRef) -> None:
        """Wait for `call`, and restart the worker as long as calls fail because of its death.

        Raises:
            MegarlError: `call` failed for another reason.
            WorkerError: the worker must not be restarted, or did not start in time.
        """
        name, restart_budget = f"rollout worker {index}", self.supervisor.restart_budget
        while True:
            try:
                wait_any([call], what="rollout worker start", names={call: name}, timeout=self._start_seconds)
            except WorkerError:
                ray.kill(self._actors[index])  # otherwise it would later pass as built
                raise
            try:
                ray.get(call)
            except WORKER_DEATHS as error:
                cause = to_megarl_error(error, what="rollout", name=name)
                pause(restart_budget.spend("rollout worker", cause, restart_budget.step, worker=name))
            except RayError as error:
                raise to_megarl_error(error, what="rollout worker start", name=name) from error
            else:
                return
            ray.kill(self._actors[index])  # Ray may only have lost contact with it
            self._actors[index] = self._launch(index)
            self._probes[index] = self._make_probe(self._actors[index])
            call = self._build(self._actors[index])

    def _launch(self, index: int) -> ray.actor.ActorHandle:
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        nodes = nodes_for_light_workers()
        here = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)].id, soft=False)
        actor = ray.remote(concurrency_groups={LIVENESS_GROUP: 1})(AsyncWorkerHost)
        options = actor.options(num_cpus=0, max_restarts=0, max_concurrency=10_000, scheduling_strategy=here)
        worker = options.remote(environment)
        # imports take seconds and overlap with the start of the engines
        worker.preimport.remote(self._worker_class, time.time())
        return worker

    def _make_probe(self, actor: ray.actor.ActorHandle) -> WorkerLivenessProbe:
        return WorkerLivenessProbe(actor, self._config.recovery.engine_stall_seconds)

    def _build(self, actor: ray.actor.ActorHandle) -> ray.ObjectRef:
        arguments = self._config, self._known_engines, find_claim(self._config.run_dir)
        return actor.build.remote(self._worker_class, arguments, {}, time.time())
