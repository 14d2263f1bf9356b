"""What a resumed run keeps, trains again and samples again."""

from dataclasses import replace

import pytest

from megarl.errors import DataError
from megarl.run.schedule.events import (
    Admitted,
    Finished,
    Lease,
    Leased,
    OpenGroup,
    Outcome,
    Pushed,
    Removed,
    ScheduleState,
    TokenVersions,
    decode_event,
    encode_event,
    recover,
)
from megarl.run.schedule.schedule import Schedule
from megarl.run.schedule.settings import Late, SchedulePolicy
from tests.errors import expect_error

ASYNC = SchedulePolicy(lookahead=1, max_staleness=2)


def killed_run():
    """Return a checkpoint of step 1, and the log until a kill in step 3: 2 groups a step, 4 open.

    Step 2 trained on (2, 4), step 3 took (3, 5); group 6 is finished and group 7 is not.
    """
    schedule = Schedule(ASYNC, 2)
    log = [schedule.admit(4), schedule.finish(0), schedule.finish(1)]
    log += [schedule.lease((0, 1)), schedule.push()]
    checkpoint = schedule.state()
    log += [schedule.admit(2), schedule.finish(4), schedule.finish(2), schedule.lease((2, 4)), schedule.push()]
    log += [schedule.admit(2), schedule.finish(3), schedule.finish(5), schedule.finish(6), schedule.lease((3, 5))]
    return checkpoint, log


def test_leased_batches_are_trained_as_logged_and_finished_groups_are_kept():
    checkpoint, log = killed_run()
    state = recover(checkpoint, log)
    assert state == recover(checkpoint, [event for event in log if event.number > checkpoint.num_events])
    assert recover(replace(checkpoint, num_events=log[-1].number), log).num_events == log[-1].number
    assert Schedule(ASYNC, 2, num_steps=3, state=state).pick() == (2, 4)
    schedule = Schedule(ASYNC, 2, state=state)
    assert (schedule.version, schedule.is_replaying) == (1, True)
    assert [group.ordinal for group in schedule.finished()] == [6]
    assert schedule.capacity == 0  # group 7 was admitted at version 2
    with expect_error(ValueError, "2", "(2", "4)", "(3", "5)"):
        schedule.lease((3, 5))
    schedule.lease(schedule.pick() or ())
    assert schedule.leased == (2, 4)
    schedule.push()
    assert schedule.admit(schedule.capacity).ordinals == (7,)
    schedule.lease(schedule.pick() or ())
    assert (schedule.leased, schedule.is_replaying, schedule.capacity) == ((3, 5), False, 0)
    schedule.push()
    assert schedule.admit(schedule.capacity).ordinals == (8, 9)
    assert schedule.state().counts.trained == 6


def test_a_checkpoint_alone_samples_open_groups_again():
    checkpoint, _ = killed_run()
    schedule = Schedule(ASYNC, 2, state=recover(checkpoint, []))
    assert (schedule.version, schedule.capacity) == (1, 4)
    assert Schedule(ASYNC, 2, num_steps=1, state=checkpoint).capacity == 0, "the run has fewer steps than the state"
    admitted = schedule.admit(4)
    assert (admitted.ordinals, admitted.version) == ((2, 3, 4, 5), 1)


def test_a_group_that_was_written_is_kept_without_its_event():
    checkpoint, log = killed_run()
    versions = {ordinal: TokenVersions(0, 0) for ordinal in (2, 3)} | {4: TokenVersions(1, 1), 5: TokenVersions(1, 1)}
    schedule = Schedule(ASYNC, 2, state=recover(checkpoint, log, versions | {7: TokenVersions(2, 2)}))
    assert [group.ordinal for group in schedule.finished()] == [7]
    assert schedule.state().leases[1].ordinals == (3, 5)


def test_a_batch_that_cannot_be_read_is_void():
    """Group 3 is lost: step 3 is sampled anew. Group 6 has tokens of version 2, which is still the version after it."""
    checkpoint, log = killed_run()
    versions = {2: TokenVersions(0, 0), 4: TokenVersions(1, 1), 5: TokenVersions(1, 2), 6: TokenVersions(2, 2)}
    state = recover(checkpoint, log, versions)
    assert [lease.ordinals for lease in state.leases] == [(2, 4)]
    schedule = Schedule(ASYNC, 2, state=state)
    assert [group.ordinal for group in schedule.finished()] == [5, 6]
    del versions[2]
    schedule = Schedule(ASYNC, 2, state=recover(checkpoint, log, versions))
    assert not schedule.state().leases
    assert [group.ordinal for group in schedule.finished()] == [4]  # 5 and 6 have tokens of the voided version 2


def test_labels_count_for_groups_that_the_log_does_not_call_finished():
    """Step 2 skips its update: groups 6 and 7, admitted at version 2, have label 1."""
    schedule = Schedule(ASYNC, 2)
    log = [schedule.admit(4), *(schedule.finish(ordinal) for ordinal in range(4))]
    log += [schedule.lease((0, 1)), schedule.push()]
    checkpoint = schedule.state()
    log += [schedule.lease((2, 3)), schedule.push(skipped=True), schedule.admit(4), schedule.finish(4)]
    finished = dict.fromkeys(range(4), TokenVersions(0, 0)) | dict.fromkeys((4, 5), TokenVersions(1, 1))
    finished |= {6: TokenVersions(0, 1), 7: TokenVersions(1, 3)}  # of a lost part of the log
    state = recover(checkpoint, log, finished)
    assert state == recover(recover(checkpoint, log), (), finished)
    found = {group.ordinal: (group.oldest, group.newest) for group in state.groups}
    assert found == {4: (2, 2), 5: (2, 2), 6: (None, None), 7: (None, None)}
    schedule = Schedule(ASYNC, 2, state=state)
    assert (schedule.version, schedule.version_of(1)) == (1, 1)  # step 2 is trained again
    schedule.lease((2, 3))
    schedule.push(skipped=True)
    assert (schedule.version_of(1), schedule.oldest_label) == (2, 0)
    del finished[2]
    voided = recover(checkpoint, log, finished)
    assert (voided.leases, voided.skipped) == ((), ())


def test_another_policy_samples_groups_again_that_it_cannot_train_in_time():
    schedule = Schedule(SchedulePolicy(lookahead=3, max_staleness=4), 1)
    schedule.admit(4)
    for ordinal in (3, 0, 1):
        schedule.finish(ordinal)
    schedule.lease((0,))
    schedule.push()
    state = schedule.state()
    same = Schedule(SchedulePolicy(lookahead=3, max_staleness=4), 1, state=state)
    assert [group.ordinal for group in same.finished()] == [1, 3]
    stricter = Schedule(SchedulePolicy(lookahead=0, max_staleness=1), 1, state=state)
    assert [group.ordinal for group in stricter.finished()] == [1]
    assert stricter.capacity == 0
    stricter.lease((1,))
    stricter.push()
    assert stricter.upcoming(3) == [2, 3, 4]
    assert stricter.admit(stricter.capacity).ordinals == (2,)


def test_groups_above_the_cap_are_not_kept_where_late_ones_are_dropped():
    groups = [OpenGroup(ordinal=i, version=version, oldest=version, newest=4) for i, version in ((0, 2), (1, 3))]
    state = ScheduleState(version=4, next_ordinal=2, groups=tuple(groups))
    for late in Late:
        kept = Schedule(SchedulePolicy(max_staleness=1, late=late), 1, state=state).finished()
        assert [group.ordinal for group in kept] == ([0, 1] if late is Late.MASK else [1])


def test_groups_wait_for_the_version_that_sampled_them_first():
    """Group 5, admitted again at version 3, comes after group 7, admitted at version 2."""
    leases = [Lease(step=step, groups=()) for step in (3, 4)]
    groups = (OpenGroup(ordinal=5, version=3), OpenGroup(ordinal=7, version=2))
    state = ScheduleState(version=2, next_ordinal=8, groups=groups, leases=tuple(leases))
    schedule = Schedule(ASYNC, 2, state=state)
    assert schedule.admit(schedule.capacity).ordinals == (7,)
    schedule.lease(())
    schedule.push()
    assert schedule.admit(schedule.capacity).ordinals == (5,)


def test_a_second_kill_reads_the_log_of_both_runs():
    checkpoint, log = killed_run()
    schedule = Schedule(ASYNC, 2, state=recover(checkpoint, log))
    log += [schedule.resume(), schedule.lease((2, 4)), schedule.push(), schedule.admit(1), schedule.finish(7)]
    state = recover(checkpoint, log)
    assert [lease.ordinals for lease in state.leases] == [(2, 4), (3, 5)]
    assert sorted(group.ordinal for group in state.groups if group.is_finished) == [6, 7]
    assert state.counts == checkpoint.counts
    numbers = [event.number for event in log]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Finished(number=99, ordinal=40, oldest=1, newest=1), "event 99 .finished.: group 40 is not open"),
        (Removed(number=99, ordinal=40, outcome=Outcome.FAILED), "event 99 .removed.: group 40 is not open"),
        (Leased(number=99, step=9, ordinals=(6,)), "event 99 .leased.: the batch of step 9 follows that of step 3"),
        (Leased(number=99, step=4, ordinals=(7,)), "event 99 .leased.: the batch of step 4 has unfinished groups"),
    ],
)
def test_a_log_that_does_not_continue_the_checkpoint(event, reason):
    checkpoint, log = killed_run()
    with pytest.raises(DataError, match=f"the log of the schedule does not continue the checkpoint: {reason}"):
        recover(checkpoint, [*log, event])


def test_encoded_events():
    _, log = killed_run()
    dropped = Pushed(number=1, version=2, dropped=(3, 4), skipped=True)
    assert [decode_event(encode_event(event)) for event in [*log, dropped]] == [*log, dropped]
    admitted = encode_event(Admitted(number=1, version=0, ordinals=(0,)))
    assert admitted == {"event": "admitted", "number": 1, "version": 0, "ordinals": (0,)}
    old = {"event": "pushed", "number": 1, "version": 2}
    assert decode_event(old) == Pushed(number=1, version=2)
    with expect_error(DataError, "'pushed'", "version", "fields"):
        decode_event({"event": "pushed", "color": 1} | old)
    with expect_error(DataError, "'retired'"):
        decode_event(admitted | {"event": "retired"})
    with expect_error(DataError, "'admitted'"):
        decode_event({"event": "admitted", "number": 1, "version": 0})
