"""Opens the schedule of a run: a new one, or the one of a killed run from its checkpoint, log and journal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from megarl.config import RunConfig
from megarl.errors import DataError
from megarl.rollout.journal.journal import Journal, open_journal, parse_step
from megarl.rollout.journal.journal_folder import journal_folder, list_steps
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.schedule_log import log_folder, read_log
from megarl.schedule.events import OpenGroup, ScheduleState
from megarl.schedule.policy import SchedulePolicy
from megarl.schedule.recovery import LogMismatchError, TokenVersions, recover
from megarl.schedule.schedule import Schedule, place

_GROUP = re.compile(r"step-\d+(?:-again(?P<attempt>\d+))?-(?P<index>\d+)")
"""Request ids of groups, as in `GroupJobs`."""


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
    folder = log_folder(journal_folder(config.run_dir))
    try:
        logged = recover(state, read_log(folder, state.num_events))
    except LogMismatchError as error:
        raise DataError(f"{folder}: {error}") from error
    journal = open_journal(config)
    logged = _add_unlogged(config, logged, journal)
    has_sampled = bool(logged.num_events or logged.groups)
    if has_sampled:
        logged = recover(logged, (), _find_finished(logged, journal, make_job))
    policy, groups_per_step = SchedulePolicy.of(config.schedule), config.algorithm.prompts_per_step
    schedule = Schedule(policy, groups_per_step, num_steps=config.trainer.steps, state=logged)
    return schedule, has_sampled


def _add_unlogged(config: RunConfig, state: ScheduleState, journal: Journal) -> ScheduleState:
    """Return the state with the groups that the journal has and the log has lost, as groups to be sampled again.

    Their request ids are not used for other samples: some may be of weights that the run does not have any more.
    """
    groups_per_step, next_ordinal, num_events = config.algorithm.prompts_per_step, state.next_ordinal, state.num_events
    first_step = first_needed_step(state, groups_per_step)
    for step in [step for step in list_steps(config.run_dir) if step >= first_step]:
        for match in filter(None, map(_GROUP.fullmatch, journal.request_ids(step))):
            next_ordinal = max(next_ordinal, (step - 1) * groups_per_step + int(match["index"]) + 1)
            num_events = max(num_events, int(match["attempt"] or 0))
    version = max((lease.step for lease in state.leases), default=state.version)
    lost = [OpenGroup(ordinal=each, version=version) for each in range(state.next_ordinal, next_ordinal)]
    return replace(state, next_ordinal=next_ordinal, num_events=num_events, groups=(*state.groups, *lost))


def _find_finished(
    state: ScheduleState, journal: Journal, make_job: Callable[[OpenGroup], GroupJob]
) -> dict[int, TokenVersions]:
    """Return the versions of those open or leased groups that the journal has, by ordinal."""
    found = {}
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
    """Return whether a run can resume from `state` with the log of the run folder, which may lack its last events.

    Raises:
        DataError: the log is damaged.
    """
    try:
        recover(state, read_log(log_folder(journal_folder(config.run_dir)), state.num_events))
    except LogMismatchError:
        return False
    return True
