"""The section `recovery`: restarts, timeouts and shutdown."""

from __future__ import annotations

from pydantic import Field

from megarl.config.section import Section


class RecoveryConfig(Section):
    """How a run reacts when one of its processes dies or hangs, and how it shuts down."""

    max_restarts: int = Field(default=20, ge=0)
    """Number of restarts in the whole run for each kind of process: engines, rollout workers, trainer, controller. The
    next failure ends the run. 0: no restarts."""

    backoff_seconds: float = Field(default=1.0, ge=0)
    """Seconds to wait before the second restart since the last completed step; doubled for each further restart."""

    max_backoff_seconds: float = Field(default=60.0, ge=0)
    """Longest wait in seconds before a restart."""

    max_identical_failures: int = Field(default=3, ge=1)
    """Abort after this many identical failures with no completed step in between."""

    engine_stall_seconds: float = Field(default=60.0, gt=0)
    """Seconds without a liveness signal after which an engine or a rollout worker counts as dead."""

    node_wait_seconds: float = Field(default=600.0, ge=0)
    """Seconds that a trainer which has lost a node waits for another node to join the cluster."""

    phase_timeout_seconds: float | None = Field(default=3600.0, gt=0)
    """Timeout in seconds of one phase of a step, which fails with a stack dump of every worker. null: no timeout."""

    grace_seconds: float = Field(default=15.0, gt=0)
    """Seconds after SIGTERM that the current step and its checkpoint may take; then the run ends without them. Slurm
    kills after 30 s by default (KillWait), and `megarl launch` after 20 s."""
