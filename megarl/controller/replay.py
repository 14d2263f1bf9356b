"""Trains a run again on the rollouts in its journal, without engines, and saves its checkpoints once more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import RunConfig
from megarl.config.placement import MAIN_POOL
from megarl.groups.auxiliary_models import AuxiliaryModels
from megarl.groups.build import read_prompts, trainer_spec
from megarl.groups.rollout_actor import ReplayActor
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.rollout_workers import RolloutWorkers
from megarl.groups.trainer_group import make_rank_processes, make_trainer_group
from megarl.placement.pool import reserve_pools
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.events import EventLog, MessageEvent
from megarl.run.replay_run import NoWeights, ReplayRun
from megarl.run.run_state import RunState
from megarl.supervision.restart_budget import RestartBudget
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.startup import Startup


class _NoSupervisor:
    """Stands in for `EngineSupervisor`: there is nothing to supervise, and no process is restarted."""

    serving = (0,)

    def __init__(self, restart_budget: RestartBudget) -> None:
        self.restart_budget = restart_budget

    def poll(self) -> None:
        """Do nothing."""

    def refs(self) -> Sequence[Any]:
        """Return no calls."""
        return ()


def replay_journal(
    config: RunConfig, events: EventLog, closing: ExitStack, startup: Startup, *, resume: Path | None, last_step: int
) -> dict[str, float]:
    """Train up to `last_step`; return the seconds of the replay, in all and by phase.

    Args:
        config: of the run, with a folder whose `journal` is that of the run.
        closing: receives the shutdown callbacks of the rollout workers.
        resume: checkpoint to begin from; None: the model folders.

    Raises:
        WorkerError: the journal lacks a group.
    """
    from megarl.algorithms.registry import find_algorithm, train

    def notify(text: str) -> None:
        events.add(MessageEvent(text))

    pools = reserve_pools(config.placement, config.placement.all_pools)
    processes = make_rank_processes(pools[MAIN_POOL], "trainer")
    trainer, load_weights = make_trainer_group(config, processes), resume is None
    engines: Any = SimpleNamespace(
        supervisor=_NoSupervisor(RestartBudget(config.recovery, notify)),
        remote_engines=lambda: [None],
        first_completion_time=time.time,
    )
    workers = RolloutWorkers(config, engines, ReplayActor)
    # a batch is read at once: in one call, it has arrived before the step that needs it
    rollout = RolloutGroup(config, engines, workers, max_per_object=config.algorithm.prompts_per_step)
    closing.callback(rollout.shutdown)
    for actor in rollout.actors().values():  # otherwise it would import estimators and torch in the first step
        actor.preimport.remote(find_algorithm(config.algorithm.type), time.time())
    models, starting = AuxiliaryModels.start(config, processes, pools, load_weights=load_weights)
    starting.append(trainer.start_workers(trainer_spec(config, load_weights=load_weights)))
    prompts = replace(read_prompts(config, Path(config.run_dir)), held_out=())
    rollout.start()
    for pending in starting:
        pending.result(config.placement.start_timeout_seconds)
    trained = {POLICY: trainer, **models.trained}
    state = RunState()
    if resume is not None:
        state = RunState.read(resume)
        load_models(resume, trained, notify)
    weights: Any = NoWeights()
    run = ReplayRun(
        config,
        events,
        PhaseTimer(),
        startup,
        trainer=trainer,
        models=models,
        rollout=rollout,
        weights=weights,
        dtype=config.model.resolved_dtype(pools[MAIN_POOL].device),
        prompts=prompts,
        checkpoints=Checkpointer(config, trained, notify) if config.checkpoint.every else None,
        resumed=state,
        last_step=last_step,
    )
    begin = time.perf_counter()
    train(run)
    run.save()
    seconds = {"total": time.perf_counter() - begin, **run.totals.snapshot(run.timer).seconds_by_phase}
    run.finish()
    return dict(seconds)
