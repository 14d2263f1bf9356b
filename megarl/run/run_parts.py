"""What an RL run is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.data.sampler import RunPrompts
from megarl.run.checkpointer import Checkpointer
from megarl.run.memory.step_ledger import ReleasingEngines
from megarl.run.remote.rollout_group import RolloutGroup
from megarl.run.remote.trainer_group import AuxiliaryModels, TrainerGroup
from megarl.run.run_state import RunState
from megarl.run.supervision.restart_budget import RestartBudget
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.run.sync.weight_sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Worker groups, models and prompts of an RL run, and what supervises and saves it."""

    trainer: TrainerGroup
    """The policy's trainer ranks."""
    models: AuxiliaryModels
    """Auxiliary models: reference, critics, reward models, teacher."""
    rollout: RolloutGroup
    """The rollout engines and the workers that hold trajectories."""
    sync: WeightSync
    """Pushes weights to the engines."""
    prompts: RunPrompts
    """Those that are trained and evaluated on."""
    dtype: str = "float32"
    """Of the policy, float32 or bfloat16; determines limits that are `auto`."""
    engines: ReleasingEngines | None = None
    """They release their memory while the trainer needs it; None: they keep it."""
    checkpoints: Checkpointer | None = None
    """Saves the run; None: no checkpoints."""
    resumed: RunState | None = None
    """State to resume from; its models have been loaded already. None: start from step 0."""
    restart_budget: RestartBudget | None = None
    """Restart counter, notified of each finished step; None: not counted."""
    monitor: RunMonitor | None = None
    """Heartbeat, phase timeouts and straggler detection; None: not monitored."""
    replay_until: int | None = None
    """Last step of a run that is trained again on its journal, without engines. None: a run that samples."""
