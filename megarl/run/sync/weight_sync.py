"""Weight sync: pushes the policy's weights from the trainer to the engines.

Colocated engines: each trainer rank gathers what the engine rank on its slot needs, and passes it on in shared memory.
Disaggregated engines (slots of their own) receive the weights over the network.

A push is one call of all trainer ranks and engines at the same time, which wait for each other. Engines report to a
store that they have received everything; when all have, the controller lets them serve it (commit_decision).

With `weight_sync.delta`, a push sends only the weights that have changed since the last one, unless that has failed or
an engine has not received it.

If an engine is lost during a push, it is restarted and the push is retried. An engine that is restarted between two
pushes receives the version that the others serve, while they continue to serve.

A delta sync builds on the latest sync that engines and trainer ranks have in common:

    sync 7   full    engines 0, 1     base of both: 7
    sync 8   delta   engines 0, 1     base of both: 8
    sync 9   full    engine 1         it was restarted; base of engine 1: 9, of engine 0: 8
    sync 10  full    engines 0, 1     the trainer ranks have the digests of sync 9, engine 0 has not received it

Trainer ranks keep digests of the latest sync only, over connections that they have not made again since. A failed sync
leaves no base. All other engines and runs have none either: the sync is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from megarl.cluster.placement.pool import SlotPool
from megarl.config import RunConfig
from megarl.errors import MegarlError, OutdatedEngineError, WeightSyncError
from megarl.megatron.requests import PushRequest
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.run.remote.engine_group import EngineGroup, EngineHandles, StartedEngine
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.supervision.restart_budget import name_some
from megarl.run.sync.sync_connections import make_connections
from megarl.run.sync.sync_update import PushReport, SyncUpdate


class DeltaBase:
    """The latest sync that has succeeded, and the engines that serve its weights."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._engines: list[StartedEngine] = []
        self._generation = -1

    def update(self, number: int, engines: Sequence[StartedEngine], generation: int) -> DeltaUpdate:
        """Return what sync `number` may leave out.

        Args:
            engines: the engines that take part.
            generation: of the trainer ranks' connections.
        """
        is_base = generation == self._generation and all(engine in self._engines for engine in engines)
        return DeltaUpdate(number=number, base=self._number if is_base else None)

    def record(self, update: DeltaUpdate, engines: Sequence[StartedEngine], generation: int) -> None:
        """Record that a sync has succeeded."""
        self._number, self._engines, self._generation = update.number, list(engines), generation

    def clear(self) -> None:
        """Record that a sync begins: if it fails, there is no base."""
        self._number, self._engines = None, []


T = TypeVar("T")


class WeightSync:
    """Pushes policy versions; engines switch to a version only after all ready engines have received all of it."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        """Connect trainer ranks and engines; `pool`: slots of the trainer."""
        self._config, self._trainer, self._engines = config, trainer, engines
        self._connections = make_connections(config, trainer, engines, pool)
        self._num_updates = 0
        self._base = DeltaBase()
        self.policy_version = -1
        """Version that the engines hold; -1 before the first push."""
        self.is_outdated = False
        """Whether the trainer has newer weights than the engines, which a restarted engine then waits for."""
        self._retry_on_engine_loss(lambda ready: self._connections.connect(ready, engines.select(ready)))
        engines.supervisor.resync = self.resync

    def push(self, policy_version: int) -> PushReport:
        """Push the trainer's current weights to all ready engines, as `policy_version`.

        Raises:
            WeightSyncError: the weights did not arrive completely; the engines refuse to serve until a push succeeds.
            WorkerError: a trainer rank died, or an engine was lost that must not be restarted.
        """

        def push(ready: Sequence[int]) -> PushReport:
            report = self._push(ready, policy_version)
            self._engines.supervisor.mark_serving(ready)
            return report

        report = self._retry_on_engine_loss(push)
        self.policy_version, self.is_outdated = policy_version, False
        self._engines.supervisor.resync = self.resync
        return report

    def resync(self, *replicas: int) -> None:
        """Push the current version to restarted engines, while the others continue to serve.

        If one of them is lost meanwhile, returns without an error: it will be restarted. Raises as `push` does.

        Raises:
            OutdatedEngineError: the trainer does not have this version any more.
        """
        if self.policy_version < 0:
            return  # the first push will include these engines
        if self.is_outdated:
            names = name_some([self._engines.name(replica) for replica in replicas])
            was, needs = ("was", "needs") if len(replicas) == 1 else ("were", "need")
            raise OutdatedEngineError(f"{names} {was} restarted and {needs} the next weights")
        supervisor = self._engines.supervisor
        while receivers := sorted(set(replicas).intersection(supervisor.ready)):
            try:
                self._push(receivers, self.policy_version)
                break
            except MegarlError as error:  # retry if a lost engine caused the failure
                if not supervisor.attribute_failure(error):
                    raise
        if self._trainer.offload_config.is_enabled:
            self._trainer.offload()

    def release_engines(self) -> None:
        """Note that another model's weights are pushed next: a later push connects the engines again, and sends all."""
        self._connections.drop(trainer=False)
        self._base.clear()

    def _retry_on_engine_loss(self, work: Callable[[Sequence[int]], T]) -> T:
        """Return `work(ready replicas)`; retry it if it fails because an engine was lost."""
        supervisor = self._engines.supervisor
        while True:
            try:
                return work(supervisor.wait_ready())
            except MegarlError as error:
                if not supervisor.attribute_failure(error):
                    raise

    def _push(self, replicas: Sequence[int], policy_version: int) -> PushReport:
        engines, connections = self._engines.select(replicas), self._connections
        connections.connect(replicas, engines)
        self._num_updates += 1
        delta = self._next_delta(engines)
        update = SyncUpdate(
            self._config.weight_sync,
            self._trainer,
            engines,
            connections,
            number=self._num_updates,
            policy_version=policy_version,
            delta=delta,
        )
        request = connections.request(replicas, engines)
        if delta is not None:
            request = replace(request or PushRequest(), delta=delta)
        self._base.clear()  # until the push has succeeded
        try:
            report = update.run(request)
        except MegarlError as error:
            connections.drop(trainer=update.breaks_trainer)
            if isinstance(error, WeightSyncError) and connections.rank_legend:
                raise type(error)(f"{error} ({connections.rank_legend})") from error
            raise
        if delta is not None:
            self._base.record(delta, engines.engines, connections.generation)
        return report

    def _next_delta(self, engines: EngineHandles) -> DeltaUpdate | None:
        """Return what the next update may leave out; None: the run compares no weights."""
        if not self._config.weight_sync.delta:
            return None
        return self._base.update(self._num_updates, engines.engines, self._connections.generation)
