"""Build a run from slots and processes; restart those that die, and repeat the steps since the last checkpoint.

- Engines and rollout workers are replaced within a step (`megarl.run.supervision`).
- If a trainer rank dies, the others hang in collectives. All trainer ranks are restarted from the newest checkpoint.
  The steps after it are trained again on the rollouts in the run's journal, which gives the same weights.
- If the controller's actor dies, Ray restarts it. It then restarts all processes from the newest checkpoint.

Only lost processes are restarted: those that have died, those that did not answer within a timeout, and those that NCCL
lost contact with. Any other error, such as an exception in a rank or in a reward function, ends the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.util import remove_placement_group

from megarl.checkpoint.run_lock import require_lock
from megarl.checkpoint.store import CheckpointStore
from megarl.cluster.placement.assign import cluster_nodes
from megarl.cluster.placement.pool import reserve_pools
from megarl.cluster.process.process_start import collect_rarely
from megarl.cluster.workers.failures import find_losses, pause
from megarl.cluster.workers.group import RemoteCall, WorkerProcesses
from megarl.config import RunConfig
from megarl.config.placement import MAIN_POOL
from megarl.controller.preflight.machine_checks import find_schedule_problems
from megarl.controller.resume import latest_valid
from megarl.engines.engine import KV_CACHE, WEIGHTS
from megarl.errors import (
    ConfigError,
    HungWorkerError,
    LostEngineError,
    LostNodeError,
    LostRankError,
    LostWorkerError,
    MegarlError,
    RestartLimitError,
    WeightSyncError,
    WorkerError,
)
from megarl.rollout.journal import journal_folder, list_steps, remove_steps_from
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.memory.step_ledger import engine_mem_fraction
from megarl.run.remote.build import read_prompts, shares_gpus, start_engines, trainer_spec
from megarl.run.remote.engine_group import EngineGroup
from megarl.run.remote.rollout_group import RolloutGroup
from megarl.run.remote.trainer_group import (
    AuxiliaryModels,
    TrainerGroup,
    make_rank_processes,
    make_trainer_group,
    read_gpu_bytes,
)
from megarl.run.run_logs import continues_log, log_folder, update_folder
from megarl.run.run_state import RunState
from megarl.run.schedule.events import ScheduleState
from megarl.run.supervision.restart_budget import RESTARTS_FILE, RestartBudget, RestartLog
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.tracking.progress import EventLog, MessageEvent
from megarl.tracking.timing import PhaseTimer, Startup

if TYPE_CHECKING:
    from megarl.run.rl_run import RLRun


LOSS_REPORT_SECONDS = 10.0
"""Time allowed for Ray to report a dead trainer process after another rank has failed because of it."""

NODE_POLL_SECONDS = 1.0
"""Interval between two attempts to reserve slots while waiting for a replacement node."""


class RunAssembly:
    """Holds a run's slots, engines, rollout workers and trainer processes across restarts of the trainer.

    Slots are reserved once, engines and rollout workers started once, trainer processes as often as they are lost.
    """

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        closing: ExitStack,
        startup: Startup,
        *,
        restart_budget: RestartBudget,
        monitor: RunMonitor,
    ) -> None:
        """Reserve the slots, request all processes, and read the prompts while those start.

        Args:
            closing: receives the shutdown callbacks of the engines.
        """
        self._config, self._events, self._closing, self._startup = config, events, closing, startup
        self._restart_budget, self._monitor = restart_budget, monitor
        with startup.phase("slots", "ray"):
            self._reserve()
        self._processes: list[WorkerProcesses] = []
        self._rollout: tuple[EngineGroup, RolloutGroup] | None = None
        self._is_rollout_started = False
        """Whether engines and rollout workers have started; from then on they are supervised."""
        self._requested: tuple[WorkerProcesses, TrainerGroup] | None = self._request_trainer()
        """Trainer processes that `assemble` has not used yet."""
        self._start_rollout(self._requested[1])
        with startup.phase("data"):
            self._prompts = read_prompts(config, Path(config.run_dir))

    def _reserve(self, device: str | None = None) -> None:
        placement = self._config.placement
        if device is not None:
            placement = placement.model_copy(update={"device": device})
        self._pools = reserve_pools(placement, placement.all_pools)
        names = {node.id: node.name for node in cluster_nodes()}
        self._nodes = {slot.node: names[slot.node] for pool in self._pools.values() for slot in pool.slots}
        """Node id -> node name for messages."""

    def assemble(self, resume: Path | None, *, restarted: bool) -> RLRun:
        """Start trainer, engines and rollout workers as needed, and return the run, ready to train.

        Args:
            resume: checkpoint folder to resume from; None: start from step 0.
            restarted: the run was in progress before; metrics logged after the step of `resume` are dropped.

        Raises:
            MegarlError: a process failed to start.
        """
        config, startup, timer = self._config, self._startup, PhaseTimer()
        with timer.phase("start", waiting=True):
            pool = self._pools[MAIN_POOL]
            processes, trainer = self._requested or self._request_trainer()
            self._requested = None
            is_first_start = not self._is_rollout_started
            engines, rollout = self._rollout or self._start_rollout(trainer)
            for problem in find_schedule_problems(config, pool.device):  # the device may only be known now
                raise ConfigError(problem)
            releases_memory = config.releases_engine_memory(pool.device)
            is_shared = is_first_start and shares_gpus(config, pool.device)
            gpu_bytes = processes.begin_run(read_gpu_bytes) if is_shared else None
            engines.abort_all()  # of a run before, whose groups are sampled again
            if releases_memory:
                engines.release((WEIGHTS, KV_CACHE))
            load_weights = resume is None
            models, starting = AuxiliaryModels.start(config, processes, self._pools, load_weights=load_weights)
            self._processes = list(models.processes)
            starting.append(trainer.start_workers(trainer_spec(config, load_weights=load_weights)))
            # these import torch, which the processes that are starting need not wait for
            from megarl.run.rl_run import RLRun
            from megarl.run.run_parts import RunParts
            from megarl.run.sync.weight_sync import WeightSync

            if is_first_start and engines.waits_for_memory:
                engines.begin_start(self._choose_mem_fraction(gpu_bytes))
            for pending in starting:
                pending.result(config.placement.start_timeout_seconds)
            if engines.waits_for_memory:
                trainer.offload()  # also returns the memory that building has left in torch's cache
                engines.resume((WEIGHTS,) if releases_memory else ())
            if is_first_start:
                engines.wait_started()
                rollout.start()
                self._is_rollout_started = True
                startup.add_processes(
                    "trainer ranks", processes.startup_timing(), requested_at=processes.requested_at, builds="megarl"
                )
                startup.add_processes(
                    "rollout engines", engines.startup_timing(), requested_at=engines.requested_at, builds="sglang"
                )
                startup.add_processes(
                    "rollout workers", rollout.startup_timing(), requested_at=rollout.requested_at, builds="megarl"
                )
            self._monitor.watch(processes, lambda: {**engines.actors(), **rollout.actors()})
            trained = {POLICY: trainer, **models.trained}
            state = self._load_checkpoint(resume, trained) if resume is not None else RunState() if restarted else None
        with startup.phase("weight sync plan"):
            sync = WeightSync.between(config, trainer, engines, pool, models)
        saved = self._monitor.heartbeat.saved
        checkpoints = Checkpointer(config, trained, self._notify, on_saved=saved) if config.checkpoint.every else None
        collect_rarely()
        parts = RunParts(
            trainer=trainer,
            models=models,
            rollout=rollout,
            sync=sync,
            prompts=self._prompts,
            dtype=config.model.resolved_dtype(pool.device),
            engines=engines if releases_memory else None,
            checkpoints=checkpoints,
            resumed=state,
            restart_budget=self._restart_budget,
            monitor=self._monitor,
        )
        return RLRun(config, self._events, timer, startup, parts)

    def _choose_mem_fraction(self, gpu_bytes: RemoteCall[list[int]] | None) -> float | None:
        """Return the engines' fraction of device memory; None: SGLang chooses.

        Args:
            gpu_bytes: of the GPUs that the engines share with the trainer; None: they share none.

        Raises:
            ConfigError: no memory is left for the KV cache.
        """
        config = self._config
        if gpu_bytes is None:
            return config.rollout.engine.mem_fraction
        fraction = engine_mem_fraction(config, min(gpu_bytes.result(config.placement.start_timeout_seconds)))
        self._notify(f"engines: {fraction.origin} {fraction.value:.3f}")
        return fraction.value

    def find_lost_process(self, error: MegarlError) -> MegarlError | None:
        """Return the loss of a trainer process that explains `error`, which a call raised; None: no process was lost.

        If a weight sync failed, a process that does not answer hangs, because its own part of the sync has a timeout.
        After other failures it may wait for the rank that failed.
        """
        actors = {name: actor for processes in self._processes for name, actor in processes.named_actors().items()}
        loss, silent = find_losses(actors, LOSS_REPORT_SECONDS)
        if loss is None and silent and isinstance(error, WeightSyncError):
            return HungWorkerError(f"{error}; no answer from {', '.join(silent)}")
        return loss

    def stop_trainer(self) -> None:
        """Stop the processes of the trainer and of all auxiliary models, which may hang waiting for the lost one.

        Engines and rollout workers that have not finished starting are stopped too: they are not supervised yet.
        """
        for processes in self._processes:
            processes.stop()
        self._processes = []
        if not self._is_rollout_started:
            self._stop_rollout()

    def replace_nodes(self) -> None:
        """If nodes are lost, wait for replacements and reserve all slots again.

        If only engines had slots on the lost nodes and another engine is alive, return without waiting.

        Raises:
            LostNodeError: no replacement joined within recovery.node_wait_seconds.
        """
        alive = {each.id for each in cluster_nodes()}
        lost = [name for node, name in self._nodes.items() if node not in alive]
        if not lost or self._can_run_without(alive):
            return
        seconds = self._config.recovery.node_wait_seconds
        self._notify(f"lost {', '.join(lost)}; waiting up to {seconds:g} s for as many replacement nodes")
        self._stop_rollout()
        remove_placement_group(self._pools[MAIN_POOL].group)
        deadline = time.monotonic() + seconds
        # keep the device: with placement.device: auto, a cluster left without GPUs would continue the run on CPUs
        device = self._pools[MAIN_POOL].device
        while (error := self._try_reserve(device)) is not None:
            if time.monotonic() > deadline:
                raise LostNodeError(
                    f"lost {', '.join(lost)}, and no node replaced them within {seconds:g} s "
                    f"(recovery.node_wait_seconds): {error}; --resume auto resumes from the newest checkpoint"
                )
            pause(NODE_POLL_SECONDS)

    def _can_run_without(self, alive: Set[str]) -> bool:
        """Whether the nodes with ids `alive` include those of all model slots and of at least one engine."""
        engines = self._rollout[0] if self._rollout is not None else None
        if engines is None or not any(engines.has_live_node(replica) for replica in range(len(engines.engine_slots))):
            return False
        pools = [pool for name, pool in self._pools.items() if name != self._config.placement.rollout.pool]
        return self._config.disaggregated and all(slot.node in alive for pool in pools for slot in pool.slots)

    def _try_reserve(self, device: str) -> MegarlError | None:
        """Reserve the slots; return the error if the cluster lacks nodes: a node that joined may be lost again."""
        try:
            self._reserve(device)
        except (ConfigError, WorkerError) as error:
            return error
        return None

    def _stop_rollout(self) -> None:
        """Stop and forget the engines and rollout workers."""
        if self._rollout is not None:
            engines, rollout = self._rollout
            rollout.shutdown()
            engines.shutdown()
            for actor in engines.actors().values():
                ray.kill(actor)
        self._rollout, self._is_rollout_started = None, False

    def _request_trainer(self) -> tuple[WorkerProcesses, TrainerGroup]:
        """Request the trainer's processes; returns at once."""
        processes = make_rank_processes(self._pools[MAIN_POOL], "trainer")
        self._processes = [processes]
        return processes, make_trainer_group(self._config, processes)

    def _start_rollout(self, trainer: TrainerGroup) -> tuple[EngineGroup, RolloutGroup]:
        engines = start_engines(self._config, self._pools, trainer.grid, self._restart_budget)
        self._closing.callback(engines.shutdown)
        rollout = RolloutGroup(self._config, engines)
        self._closing.callback(rollout.shutdown)
        self._rollout = engines, rollout
        return self._rollout

    def _load_checkpoint(self, folder: Path, trained: dict[str, TrainerGroup]) -> RunState:
        """Load the checkpoint's models into the trainer processes; return the controller's state."""
        state = RunState.read(folder)
        self._notify(f"resuming from step {state.step}: {folder}")
        self._restart_budget.mark_step_done(state.step)
        self._monitor.heartbeat.saved(state.step)
        load_models(folder, trained, self._notify)
        return state

    def _notify(self, text: str) -> None:
        self._events.add(MessageEvent(text))


class Recovery:
    """Assembles a run, and assembles it again from the newest checkpoint when processes are lost."""

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        closing: ExitStack,
        startup: Startup,
        *,
        resume: Path | None,
        restarted: bool,
    ) -> None:
        """Reserve the slots and request all processes.

        Args:
            closing: receives the shutdown callbacks of what must end gracefully.
            resume: checkpoint folder to resume from; None: start from step 0.
            restarted: Ray has restarted the controller: resume from the run's newest valid checkpoint, if there is one.

        Raises:
            RestartLimitError: the controller was lost too often.
        """

        def notify(text: str) -> None:
            events.add(MessageEvent(text))

        self._config, self._notify = config, notify
        self._resume, self._restarted = resume, restarted
        self._restart_budget = _open_restart_budget(config, notify, restarted=restarted)
        self._monitor = RunMonitor(config, notify)
        closing.push(self._monitor.close)
        self._assembly = RunAssembly(
            config, events, closing, startup, restart_budget=self._restart_budget, monitor=self._monitor
        )
        self._checkpoint = self._newest_checkpoint() if restarted else resume
        self.is_finished = False
        """Whether the body of an `attempt` has reached its end."""

    @contextmanager
    def attempt(self) -> Iterator[RLRun]:
        """Yield the run, ready to train; a body that loses a process ends without an error, to be attempted again.

        Raises:
            MegarlError: an error that no lost process explains, or the restart budget is spent.
        """
        run = self._assemble()
        try:
            yield run
        except (WorkerError, WeightSyncError) as error:
            self._recover(error, run)
        else:
            self.is_finished = True

    def _assemble(self) -> RLRun:
        """Assemble the run, as often as processes are lost meanwhile."""
        while True:
            if self._checkpoint is None and self._restarted:
                discard_partial_journal(self._config)
            try:
                with self._monitor.start(self._restart_budget.step):
                    run = self._assembly.assemble(self._checkpoint, restarted=self._restarted)
            except (WorkerError, WeightSyncError) as error:
                self._recover(error, None)
            else:
                self._monitor.heartbeat.status("running")
                return run

    def _recover(self, error: MegarlError, run: RLRun | None) -> None:
        """Stop the trainer after a loss, and wait for nodes that replace lost ones.

        Args:
            run: None: it was not assembled yet.

        Raises:
            MegarlError: `error`, if no lost process explains it, or the restart budget is spent.
        """
        if isinstance(error, RestartLimitError):
            raise error
        loss = _find_loss(error, self._assembly, is_first_start=run is None and not self._restarted)
        if loss is None:
            raise error
        seconds = self._restart_budget.spend("trainer", loss, run.step if run is not None else 0)
        self._monitor.heartbeat.status("recovering")
        self._assembly.stop_trainer()
        if run is not None:
            run.abort()
        pause(seconds)
        self._assembly.replace_nodes()
        self._checkpoint, self._restarted = self._newest_checkpoint(), True

    def _newest_checkpoint(self) -> Path | None:
        saved = latest_valid(self._config, self._notify)
        return saved.folder if saved is not None else self._resume


def _open_restart_budget(config: RunConfig, notify: Callable[[str], None], *, restarted: bool) -> RestartBudget:
    """Return the budget of the command, of which a restarted controller spends one restart for itself.

    Raises:
        RestartLimitError: the controller was lost too often.
    """
    log = RestartLog(Path(config.run_dir) / RESTARTS_FILE, partial(require_lock, config.run_dir))
    if not restarted:
        log.begin()
        return RestartBudget(config.recovery, notify, log)
    # the steps after the newest checkpoint are repeated: only another checkpoint is progress
    saved = [entry.step for entry in CheckpointStore(config.run_dir).entries()]
    restart_budget = RestartBudget(config.recovery, notify, log, last_step=max(saved, default=0))
    pause(restart_budget.spend("controller", LostWorkerError("its process has ended"), restart_budget.step))
    return restart_budget


def discard_partial_journal(config: RunConfig) -> None:
    """Remove the groups of a run that starts over from step 0 and does not have those of its first steps any more.

    The weights that sampled them will not be those of the same step this time.
    """
    run_dir, steps = config.run_dir, [step for step in list_steps(config.run_dir) if step > 0]
    is_whole = steps[:1] in ([], [1]) if config.schedule.type == "sync" else continues_log(config, ScheduleState())
    if is_whole:
        return
    remove_steps_from(run_dir, 1)
    for folder in (log_folder(journal_folder(run_dir)), update_folder(journal_folder(run_dir))):
        shutil.rmtree(folder, ignore_errors=True)


def _find_loss(error: MegarlError, assembly: RunAssembly, *, is_first_start: bool) -> MegarlError | None:
    """Return the loss of a process that is, or explains, `error`; None: no process was lost.

    Args:
        is_first_start: the processes have never worked together: only a death counts, because a timeout or a lost
            connection then more likely comes from the configuration, which a restart does not change.
    """
    loss = error if isinstance(error, LostWorkerError | LostEngineError) else assembly.find_lost_process(error)
    if loss is None and isinstance(error, HungWorkerError | LostRankError):
        loss = error
    return None if is_first_start and not isinstance(loss, LostWorkerError | LostEngineError) else loss
