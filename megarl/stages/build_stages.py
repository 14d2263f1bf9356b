"""The stages that need no engines, over processes of any kind."""

from __future__ import annotations

from pathlib import Path

from megarl.config import DpoConfig, RmConfig, SftConfig, StageConfig
from megarl.groups.build import build_dpo, build_trainer
from megarl.groups.trainer_group import TrainerGroup
from megarl.run.checkpointer import POLICY, Checkpointer
from megarl.run.events import EventLog, Note
from megarl.stages.dpo import DpoRun
from megarl.stages.reward_model import RmRun
from megarl.stages.sft import SftRun
from megarl.workers.group import Processes


def make_sft(config: SftConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> SftRun:
    """Supervised fine-tuning; from the checkpoint `resume`, where there is one."""
    trainer = build_trainer(config, processes, fill=resume is None)
    checkpoints = _checkpoints(config, events, processes, trainer)
    return SftRun(config, events, trainer, checkpoints=checkpoints, resume=resume)


def make_rm(config: RmConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> RmRun:
    """A reward or cost model from pairs; from the checkpoint `resume`, where there is one."""
    trainer = build_trainer(config, processes, fill=resume is None)
    checkpoints = _checkpoints(config, events, processes, trainer)
    return RmRun(config, events, trainer, checkpoints=checkpoints, resume=resume)


def make_dpo(config: DpoConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> DpoRun:
    """Direct preference optimisation; from the checkpoint `resume`, where there is one."""
    trainer, reference = build_dpo(config, processes)
    checkpoints = _checkpoints(config, events, processes, trainer)
    return DpoRun(config, events, trainer, reference, checkpoints=checkpoints, resume=resume)


def _checkpoints(
    config: StageConfig, events: EventLog, processes: Processes, trainer: TrainerGroup
) -> Checkpointer | None:
    """Where the run is saved, if it is."""
    if not config.checkpoint.every:
        return None

    def say(text: str) -> None:
        events.add(Note(text))

    return Checkpointer(config, {POLICY: trainer}, say, on_first=processes.on_first)
