"""The slots of a run, and the processes on them: a lost trainer is replaced beside engines that live on."""

from __future__ import annotations

import time
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path

import ray
from ray.util import remove_placement_group

from megarl.config import RunConfig
from megarl.config.placement import MAIN_POOL
from megarl.errors import ConfigError, LostNodeError, MegarlError, WorkerError
from megarl.groups.auxiliary_models import Models
from megarl.groups.build import read_prompts, start_engines, trainer_spec
from megarl.groups.engine_group import EngineGroup
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.trainer_group import TrainerGroup, rank_processes, trainer_on
from megarl.groups.weight_sync import WeightSync
from megarl.placement.nodes import cluster_nodes
from megarl.placement.pool import reserve_pools
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.events import EventLog, Note
from megarl.run.rl_run import PolicyRun
from megarl.run.run_state import RunState
from megarl.supervision.restart_budget import Restarts
from megarl.supervision.run_monitor import Vigil
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.startup import Startup
from megarl.workers.group import WorkerProcesses

LOOK_SECONDS = 1.0
"""Between two looks whether a machine has come."""


class Fleet:
    """Slots once, engines and rollout workers once, and trainer processes as often as they are lost."""

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        closing: ExitStack,
        startup: Startup,
        *,
        restarts: Restarts,
        vigil: Vigil,
    ) -> None:
        """`closing` ends what must end in order."""
        self._config, self._events, self._closing, self._startup = config, events, closing, startup
        self._restarts, self._vigil = restarts, vigil
        with startup.phase("slots", "ray"):
            self._reserve()
        self._processes: list[WorkerProcesses] = []
        self._rollout: tuple[EngineGroup, RolloutGroup] | None = None
        self._is_up = False
        """Engines and rollout workers are; from then on they are supervised."""
        with startup.phase("data"):
            self._prompts, self._held_out = read_prompts(config)

    def _reserve(self, device: str | None = None) -> None:
        placement = self._config.placement
        if device is not None:
            placement = placement.model_copy(update={"device": device})
        self._pools = reserve_pools(placement, placement.all_pools)
        names = {node.id: node.name for node in cluster_nodes()}
        self._nodes = {slot.node: names[slot.node] for pool in self._pools.values() for slot in pool.slots}
        """Machines by id, as people know them."""

    def assemble(self, resume: Path | None, *, again: bool) -> PolicyRun:
        """Trainer, engines and rollout workers, up and idle.

        Args:
            resume: the checkpoint that the run goes on from; None: it begins.
            again: it has been under way before; what it has logged since is forgotten.

        Raises:
            MegarlError: something did not come up.
        """
        config, startup, timer = self._config, self._startup, PhaseTimer()
        with timer.phase("start", waiting=True):
            pool = self._pools[MAIN_POOL]
            processes = rank_processes(pool, "trainer")
            self._processes = [processes]
            trainer = trainer_on(config, processes)
            first = not self._is_up
            engines, rollout = self._rollout or self._start_rollout(trainer)
            fill = resume is None
            models, starting = Models.start(config, processes, self._pools, fill=fill)
            self._processes = list(models.processes)
            starting.append(trainer.start_workers(trainer_spec(config, fill=fill)))
            for pending in starting:
                pending.result(config.placement.start_timeout_seconds)
            if first:
                engines.wait_started()
                rollout.start()
                self._is_up = True
                startup.add_processes("trainer ranks", processes.came_up(), asked=processes.asked, builds="megarl")
                startup.add_processes("rollout engines", engines.came_up(), asked=engines.asked, builds="sglang")
                startup.add_processes("rollout workers", rollout.came_up(), asked=rollout.asked, builds="megarl")
            self._vigil.follow(processes, trainer.grid, lambda: {**engines.actors(), **rollout.actors()})
            trained = {POLICY: trainer, **models.trained}
            state = self._load(resume, trained) if resume is not None else RunState() if again else None
        with startup.phase("weight sync plan"):
            weights = WeightSync(config, trainer, engines, pool)
        saved = self._vigil.heartbeat.saved
        checkpoints = Checkpointer(config, trained, self._say, saved=saved) if config.checkpoint.every else None
        return PolicyRun(
            config,
            self._events,
            timer,
            startup,
            trainer=trainer,
            models=models,
            rollout=rollout,
            weights=weights,
            prompts=self._prompts,
            held_out=self._held_out,
            checkpoints=checkpoints,
            resumed=state,
            restarts=self._restarts,
            vigil=self._vigil,
        )

    def end_trainer(self) -> None:
        """End the trainer's processes, and those of all models: they wait for the one that is lost.

        Engines and rollout workers that have not come up yet end too: nobody looks after them.
        """
        for processes in self._processes:
            processes.stop()
        self._processes = []
        if not self._is_up:
            self._end_rollout()

    def replace_nodes(self) -> None:
        """Have all slots on machines that are there: another one, which may yet come, gives those of one that is lost.

        Where only engines had slots on it, and other engines live, nothing is waited for.

        Raises:
            LostNodeError: none has come in time.
        """
        there = {each.id for each in cluster_nodes()}
        lost = [name for node, name in self._nodes.items() if node not in there]
        if not lost or self._can_do_without(there):
            return
        seconds = self._config.recovery.node_wait_seconds
        self._say(f"lost {', '.join(lost)}; waiting up to {seconds:g} s for as many machines to take their place")
        self._end_rollout()
        remove_placement_group(self._pools[MAIN_POOL].group)
        deadline = time.monotonic() + seconds
        # without GPUs, a run that chose its device by itself would go on with CPUs
        device = self._pools[MAIN_POOL].device
        while (lacking := self._lacking(device)) is not None:
            if time.monotonic() > deadline:
                raise LostNodeError(
                    f"lost {', '.join(lost)}, and no machine took their place within {seconds:g} s "
                    f"(recovery.node_wait_seconds): {lacking}; --resume auto goes on from the newest checkpoint"
                )
            time.sleep(LOOK_SECONDS)

    def _can_do_without(self, there: Set[str]) -> bool:
        """Whether the machines with these ids are all that models have slots on, and one engine has its own."""
        engines = self._rollout[0] if self._rollout is not None else None
        if engines is None or not any(engines.has_machine(replica) for replica in range(len(engines.servers))):
            return False
        pools = [pool for name, pool in self._pools.items() if name != self._config.placement.rollout.pool]
        return self._config.engines_apart and all(slot.node in there for pool in pools for slot in pool.slots)

    def _lacking(self, device: str) -> MegarlError | None:
        """Reserve the slots; what the cluster, as it is now, lacks for that: a machine that came may be lost again."""
        try:
            self._reserve(device)
        except (ConfigError, WorkerError) as error:
            return error
        return None

    def _end_rollout(self) -> None:
        """End engines and rollout workers."""
        if self._rollout is not None:
            engines, rollout = self._rollout
            engines.shutdown()
            for actor in (*engines.actors().values(), *rollout.actors().values()):
                ray.kill(actor)
        self._rollout, self._is_up = None, False

    def _start_rollout(self, trainer: TrainerGroup) -> tuple[EngineGroup, RolloutGroup]:
        engines = start_engines(self._config, self._pools, trainer.grid, self._restarts)
        self._closing.callback(engines.shutdown)
        self._rollout = engines, RolloutGroup(self._config, engines)
        return self._rollout

    def _load(self, folder: Path, trained: dict[str, TrainerGroup]) -> RunState:
        """The checkpoint's models in the trainer's processes, and the controller's state."""
        state = RunState.read(folder)
        self._say(f"going on from step {state.step}: {folder}")
        self._restarts.step_done(state.step)
        self._vigil.heartbeat.saved(state.step)
        load_models(folder, trained, self._say)
        return state

    def _say(self, text: str) -> None:
        self._events.add(Note(text))
