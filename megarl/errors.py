"""The exceptions that megarl raises.

    MegarlError                    everything below; exit code 1
    |-- ConfigError (ValueError)   the configuration cannot work; exit code 2
    |-- DataError (ValueError)     a data file, model folder or tokenizer cannot be used; exit code 2
    |-- RewardError                a reward function raised, timed out or returned no finite number; exit code 2
    |-- AgentError                 an agent raised an exception or returned no valid trajectory; exit code 2
    |-- SandboxError               a sandbox for untrusted programs could not be started or was lost; exit code 1
    |-- WorkerError                a trainer worker or rollout engine died or failed; exit code 1
    |   |-- LostWorkerError        a process has ended
    |   |-- LostEngineError        a rollout engine has ended or hangs; its requests can be retried on another
    |   |-- StalledEngineError     a rollout engine makes no progress; its requests can be sent to another
    |   |-- HungWorkerError        a process did not answer within its timeout
    |   `-- RestartLimitError      processes were lost more often than `recovery` allows
    |-- LostLockError              another run has taken over the run folder; exit code 1
    |-- LostNodeError              a node of a run was lost and not replaced in time; exit code 4
    |-- LaunchError                nodes did not join the launch, or one was lost; exit code 1
    |-- WeightSyncError            a weight sync did not complete; exit code 1
    |   |-- LostRankError          because another rank has ended or aborted
    |   `-- WeightDifferenceError  an engine holds other weights than the trainer has sent
    |-- LimitError                 a monitored quantity passed its configured limit; exit code 3
    `-- EarlyStop                  a run stopped gracefully before its last step, on request; exit code 75

All take one message, so that pickle can carry them between processes.
"""

from __future__ import annotations

from typing import ClassVar


class MegarlError(Exception):
    """Base class of all errors that megarl raises."""

    exit_code: ClassVar[int] = 1


class ConfigError(MegarlError, ValueError):
    """A configuration value is invalid; the message names its YAML path."""

    exit_code = 2


class DataError(MegarlError, ValueError):
    """A data file, model folder or tokenizer cannot be used; the message names file and line."""

    exit_code = 2


class RewardError(MegarlError):
    """A reward function raised, timed out or returned no finite number."""

    exit_code = 2


class AgentError(MegarlError):
    """An agent raised an exception or returned no valid trajectory."""

    exit_code = 2


class SandboxError(MegarlError):
    """A sandbox could not be started, or was lost for a reason that is not the program's in it."""


class WorkerError(MegarlError):
    """A trainer worker or rollout engine died or failed; the message includes the end of its log."""


class LostWorkerError(WorkerError):
    """The process of a worker has ended."""


class LostEngineError(WorkerError):
    """A rollout engine has ended or hangs; its requests can be retried on another engine."""


class StalledEngineError(WorkerError):
    """A rollout engine lives and makes no progress; its requests can be sent to another one."""


class OutdatedEngineError(WorkerError):
    """A restarted engine needs weights that the trainer has already updated; it serves after the next push."""


class HungWorkerError(WorkerError):
    """A trainer worker, rollout worker or engine did not answer within a timeout; the message names it."""


class RestartLimitError(WorkerError):
    """Processes were lost too often, or repeatedly for the same reason; the message includes the last failure."""


class LostLockError(MegarlError):
    """This run no longer holds the lock of its run folder; the message names the folder and the new holder."""


class LostNodeError(MegarlError):
    """A node was lost and not replaced in time; the message names the checkpoint to resume from."""

    exit_code = 4


class LaunchError(MegarlError):
    """Nodes did not join the launch, or one was lost; the message names it."""


class WeightSyncError(MegarlError):
    """The weights did not arrive completely at a rollout engine."""


class LostRankError(WeightSyncError):
    """Another rank has ended or aborted; that rank reports the cause."""


class WeightDifferenceError(WeightSyncError):
    """An engine holds other weights than the trainer has sent; the message names tensor, box and engine."""


class LimitError(MegarlError):
    """A monitored quantity passed its configured limit."""

    exit_code = 3


class EarlyStop(MegarlError):  # noqa: N818 -- not a failure
    """A run stopped gracefully before its last step, on request; the message names its model's folder."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: rerun to continue
