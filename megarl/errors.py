"""The exceptions that megarl raises.

    MegarlError                    everything below; exit code 1
    |-- ConfigError (ValueError)   the configuration cannot work; exit code 2
    |-- DataError (ValueError)     a data file, model folder or tokenizer cannot be used; exit code 2
    |-- RewardError                a reward function raised, timed out or returned no finite number; exit code 2
    |-- WorkerError                a trainer worker or rollout engine died or failed; exit code 1
    |   |-- LostWorkerError        a process has ended
    |   |-- LostEngineError        a rollout engine is gone, with the requests that it had
    |   `-- GivenUpError           one has been lost too often
    |-- LostNodeError              a machine of a run was lost, and none came in its place; exit code 4
    |-- LaunchError                nodes did not meet, or one of a run's was lost; exit code 1
    |-- WeightSyncError            weights did not arrive whole; exit code 1
    |   `-- LostRankError          because another rank is gone or has given up
    |-- LimitError                 a watched quantity passed its configured limit; exit code 3
    `-- StoppedEarly               a run ended in order before its last step, as it was asked to; exit code 75

All take one message, so that they cross process boundaries by pickle.
"""

from __future__ import annotations

from typing import ClassVar


class MegarlError(Exception):
    """Base of every error that megarl raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(MegarlError, ValueError):
    """A configuration value that cannot work; the message names its YAML path."""

    exit_code = 2


class DataError(MegarlError, ValueError):
    """A data file, model folder or tokenizer that cannot be used; the message names file and line."""

    exit_code = 2


class RewardError(MegarlError):
    """A reward function that raised, timed out or returned no finite number."""

    exit_code = 2


class WorkerError(MegarlError):
    """A trainer worker or rollout engine that died or failed; carries its last words."""


class LostWorkerError(WorkerError):
    """A worker's process that has ended."""


class LostEngineError(WorkerError):
    """A rollout engine that has ended, or is taken for dead; another one may do what it was asked."""


class GivenUpError(WorkerError):
    """A process that was lost too often, or again and again for the same reason; carries the last one."""


class LostNodeError(MegarlError):
    """A machine that was lost, and for which none came in time; says where the run can go on from."""

    exit_code = 4


class LaunchError(MegarlError):
    """Nodes that did not meet, or one that was lost; names it."""


class WeightSyncError(MegarlError):
    """Weights that did not arrive whole at a rollout engine."""


class LostRankError(WeightSyncError):
    """Another rank is gone or has given up, which has the cause to tell."""


class LimitError(MegarlError):
    """A watched quantity that passed its configured limit."""

    exit_code = 3


class StoppedEarly(MegarlError):  # noqa: N818 -- nothing went wrong
    """A run that ended in order before its last step, as it was asked to; says where its model is."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: to be tried again
