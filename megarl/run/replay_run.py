"""A run that trains again on the rollouts of another run's journal, without engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, override

from megarl.reshard.planning.strategy import SyncStats
from megarl.rollout.journal.journal import journal_folder
from megarl.run.reward_weights import RewardWeights
from megarl.run.rl_run import RLRun
from megarl.run.schedule.events import Pushed, ScheduleState
from megarl.run.schedule.rebuild import recover
from megarl.run.schedule.schedule import Schedule
from megarl.run.schedule.settings import SchedulePolicy
from megarl.run.schedule_log import list_files, log_folder, read_log
from megarl.run.scheduled_groups import ScheduledGroups
from megarl.run.step_limits import LimitDecision
from megarl.run.sync.sync_update import PushReport
from megarl.run.update_log import UpdateLog


class NoWeights:
    """Stands in for `EngineWeights` where no engine receives weights: counts the versions."""

    def __init__(self) -> None:
        self.policy_version = -1

    def select(self, model: str | None) -> bool:
        """Return False: no model needs to be pushed."""
        del model
        return False

    def mark_outdated(self, model: str | None) -> None:
        """Do nothing."""

    def push(self, policy_version: int) -> PushReport:
        """Record the version."""
        self.policy_version = policy_version
        stats = SyncStats(bytes_sent=0, bytes_received=0, bytes_delivered=0, buckets=0, peak_extra_bytes=0)
        return PushReport(stats=stats, seconds={}, bytes_moved=0)


class ReplayRun(RLRun):
    """Repeats the steps of a run up to `last_step`; its schedule takes the logged batches."""

    def __init__(self, *arguments: Any, last_step: int, **options: Any) -> None:
        """Arguments as for `RLRun`; `last_step`: the last step of the journal."""
        super().__init__(*arguments, **options)
        self._last_step = last_step

    @override
    def should_stop(self) -> bool:
        return super().should_stop() or self.step >= self._last_step

    @override
    def _open_updates(self) -> UpdateLog:
        return UpdateLog(self.config.run_dir, after=self._resumed.step, writes=False)

    @override
    def _probe_engines(self) -> dict[str, float]:
        return {}  # there is no engine to compare with

    @override
    def _apply(self, decision: LimitDecision) -> str:
        if decision.action == "stop":  # the run has finished the step nevertheless
            decision = replace(decision, action="warn")
        return super()._apply(decision)

    @override
    def _open_weights(self) -> RewardWeights:
        return RewardWeights(self.config, self._resumed.reward_weights, writes=False)

    @override
    def _discard_groups(self) -> None:
        """Do nothing: the journal is another run's."""

    @override
    def _open_schedule(self) -> ScheduledGroups:
        jobs, state = self._begin_schedule(), logged_batches(Path(self.config.run_dir), self._schedule_begin)
        policy, groups_per_step = SchedulePolicy.of(self.config.schedule), self.config.algorithm.prompts_per_step
        schedule = Schedule(policy, groups_per_step, num_steps=self._last_step, state=state)
        return self._scheduled_groups(schedule, jobs, None, resumed=True)


def logged_batches(run_dir: Path, state: ScheduleState) -> ScheduleState:
    """Return the state from which a replay begins: the logged batches after `state`, and no other group.

    Raises:
        LogMismatchError: the log of the schedule does not continue the state.
        DataError: the log is damaged.
    """
    events = read_log(log_folder(journal_folder(run_dir)), state.num_events)
    return replace(recover(state, events), groups=())


def last_logged_step(run_dir: Path) -> int:
    """Return the last step whose batch is in the log of the schedule and was trained; 0: none."""
    folder = log_folder(journal_folder(run_dir))
    for path in reversed(list_files(folder)):  # the last files have it
        versions = [event.version for event in read_log(folder, int(path.stem) - 1) if isinstance(event, Pushed)]
        if versions:
            return max(versions)
    return 0
