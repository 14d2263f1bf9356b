"""Builds the stages without engines: SFT, reward model, DPO. Ranks run in Ray actors or in the calling process."""

from __future__ import annotations

from pathlib import Path

from megarl.cluster.workers.group import Processes
from megarl.config import DpoConfig, RmConfig, SftConfig, StageConfig
from megarl.run.checkpointer import POLICY, Checkpointer
from megarl.run.remote.build import build_dpo, build_trainer
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.run_events import EventLog, MessageEvent
from megarl.stages.pairwise import DpoRun, RewardModelRun
from megarl.stages.supervised import SftRun


def make_sft(config: SftConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> SftRun:
    """Build an SFT run; `resume`: folder of the checkpoint to resume from."""
    trainer = build_trainer(config, processes, load_weights=resume is None)
    checkpoints = _make_checkpointer(config, events, processes, trainer)
    return SftRun(config, events, trainer, checkpoints=checkpoints, resume=resume)


def make_rm(config: RmConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> RewardModelRun:
    """Build a run that trains a reward or cost model; `resume`: folder of the checkpoint to resume from."""
    trainer = build_trainer(config, processes, load_weights=resume is None)
    checkpoints = _make_checkpointer(config, events, processes, trainer)
    return RewardModelRun(config, events, trainer, checkpoints=checkpoints, resume=resume)


def make_dpo(config: DpoConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> DpoRun:
    """Build a DPO run; `resume`: folder of the checkpoint to resume from."""
    trainer, reference = build_dpo(config, processes)
    checkpoints = _make_checkpointer(config, events, processes, trainer)
    return DpoRun(config, events, trainer, reference, checkpoints=checkpoints, resume=resume)


def _make_checkpointer(
    config: StageConfig, events: EventLog, processes: Processes, trainer: TrainerGroup
) -> Checkpointer | None:
    """Create the checkpointer; None if the configuration disables checkpoints."""
    if not config.checkpoint.every:
        return None

    def notify(text: str) -> None:
        events.add(MessageEvent(text))

    return Checkpointer(config, {POLICY: trainer}, notify, run_on_rank0=processes.run_on_rank0)
