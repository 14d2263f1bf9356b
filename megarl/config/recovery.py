from __future__ import annotations

from pydantic import Field

from megarl.config.section import Section


class RecoveryConfig(Section):
    """What becomes of a run when one of its processes dies or stalls."""

    max_restarts: int = Field(default=20, ge=0)
    """Processes of one kind (engines, rollout workers, trainer, controller) that are started anew in the whole run; the
    next that is lost ends it. 0: the first one does."""

    backoff_seconds: float = Field(default=1.0, ge=0)
    """Before the second restart between two finished steps; doubled for each further one."""

    max_backoff_seconds: float = Field(default=60.0, ge=0)

    same_failure: int = Field(default=3, ge=1)
    """So many times the same failure without a finished step between them is fatal."""

    engine_stall_seconds: float = Field(default=60.0, gt=0)
    """An engine or a rollout worker that does not say for so long that it is there is taken for dead."""

    node_wait_seconds: float = Field(default=600.0, ge=0)
    """How long a trainer that has lost a machine waits for another to join the cluster."""

    phase_timeout_seconds: float | None = Field(default=3600.0, gt=0)
    """A phase that takes longer is a failure, told with every worker's stack. Null: phases may take any time."""

    grace_seconds: float = Field(default=15.0, gt=0)
    """After SIGTERM, how long the step under way and its checkpoint may take; then the run ends as it is. Slurm waits
    30 s by default (KillWait), and `megarl launch` 20 s."""
