"""The section `recovery`: restarts, timeouts and shutdown."""

from __future__ import annotations

from pydantic import Field

from megarl.config.section import Section


class RecoveryConfig(Section):
    """How a run reacts when one of its processes dies or hangs, and how it shuts down."""

    max_restarts: int = Field(default=20, ge=0)
    """Number of restarts within `restart_window_seconds` for each process of a kind: with 100 engines, 100 times as
    many restarts of engines. The ranks of the trainer restart together and count as one process. The next failure
    within the window ends the run. 0: no restarts."""

    restart_window_seconds: float = Field(default=86_400.0, gt=0)
    """Seconds for which a restart counts. A run that loses fewer processes in any such time continues for ever."""

    backoff_seconds: float = Field(default=1.0, ge=0)
    """Seconds to wait before the second restart since the last completed step; doubled for each further restart."""

    max_backoff_seconds: float = Field(default=60.0, ge=0)
    """Longest wait in seconds before a restart."""

    max_identical_failures: int = Field(default=3, ge=1)
    """Abort after this many identical failures of a process with no completed step in between. An engine is left out
    instead while others serve."""

    engine_stall_seconds: float = Field(default=60.0, gt=0)
    """Seconds without an answer to a ping after which an engine or a rollout worker counts as dead. Each is pinged
    every quarter of this time."""

    node_wait_seconds: float = Field(default=600.0, ge=0)
    """Seconds that a trainer which has lost a node waits for another node to join the cluster."""

    phase_timeout_seconds: float | None = Field(default=3600.0, gt=0)
    """Timeout in seconds of one phase of a step, which fails with a stack dump of every worker. null: no timeout."""

    grace_seconds: float = Field(default=15.0, gt=0)
    """Seconds after SIGTERM that the current step and its checkpoint may take; then the run ends without them. Slurm
    kills after 30 s by default (KillWait), and `megarl launch` after 20 s."""
