"""Opens the schedule of a run: a new one, or the one of a killed run from its checkpoint, log and journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megarl.config import RunConfig
from megarl.rollout.journal.journal import open_journal, parse_step
from megarl.rollout.journal.journal_folder import journal_folder
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.schedule_log import log_folder, read_log
from megarl.schedule.events import OpenGroup, ScheduleState
from megarl.schedule.policy import SchedulePolicy
from megarl.schedule.recovery import TokenVersions, recover
from megarl.schedule.schedule import Schedule, place


def open_schedule(
    config: RunConfig, state: ScheduleState, make_job: Callable[[OpenGroup], GroupJob]
) -> tuple[Schedule, bool]:
    """Return the schedule that continues `state`, and whether it resumes a run that has sampled groups before.

    Args:
        state: of the checkpoint; that of a new run if there is none.
        make_job: returns the job of an open group, under whose request id the journal has the group if it is finished.

    Raises:
        DataError: the log of the schedule is damaged, or does not continue the state.
        WorkerError: the journal cannot be read.
    """
    events = list(read_log(log_folder(journal_folder(config.run_dir))))
    logged = recover(state, events)
    if logged.num_events:
        logged = recover(state, events, _find_finished(config, logged, make_job))
    policy, groups_per_step = SchedulePolicy.of(config.schedule), config.algorithm.prompts_per_step
    schedule = Schedule(policy, groups_per_step, num_steps=config.trainer.steps, state=logged)
    return schedule, bool(logged.num_events)


def _find_finished(
    config: RunConfig, state: ScheduleState, make_job: Callable[[OpenGroup], GroupJob]
) -> dict[int, TokenVersions]:
    """Return the versions of those open or leased groups that the journal has, by ordinal."""
    journal, found = open_journal(config), {}
    for group in (*state.groups, *(group for lease in state.leases for group in lease.groups)):
        job = make_job(group)
        step = parse_step(job.request_id)
        assert step is not None, f"{job.request_id} is not in the journal"
        (entry,) = journal.lookup(step, [job])
        if entry is not None:
            versions = [v for trajectory in entry.summary.trajectories for v, _ in trajectory.tokens_by_version]
            found[group.ordinal] = TokenVersions(
                oldest=min(versions, default=group.version), newest=max(versions, default=group.version)
            )
    return found


def first_needed_step(state: ScheduleState, groups_per_step: int) -> int:
    """Return the first step of the journal that has groups which a run resumed from `state` may read."""
    open_groups = (*state.groups, *(group for lease in state.leases for group in lease.groups))
    first = min([state.next_ordinal, *(group.ordinal for group in open_groups)])
    return place(first, groups_per_step)[0]


def continues_log(config: RunConfig, state: ScheduleState) -> bool:
    """Return whether the log of the run folder has all events after `state`, or none."""
    first = next(read_log(log_folder(journal_folder(Path(config.run_dir)))), None)
    return first is None or first.number <= state.num_events + 1
