import pytest

from megarl.config.recovery import RecoveryConfig
from megarl.errors import WeightSyncError, WorkerError
from megarl.supervision.restart_budget import RestartBudget


def make_death(pid=1, how="SIGKILL"):
    return WorkerError(f"process {pid} was ended by {how}; the end of /logs/{pid}.log:\nlast words {how * pid}")


def make_budget(messages=None, counts=None, **config):
    return RestartBudget(RecoveryConfig(**config), [].append if messages is None else messages.append, counts)


def test_restarts_are_reported_with_cause_and_count():
    messages = []
    budget = make_budget(messages, max_restarts=5)
    assert budget.spend("engine", make_death(17), 1, worker="engine 1") == 0
    assert budget.spend("trainer", make_death(18, "SIGBUS"), 1) == 0
    assert budget.spend("engine", make_death(19, "SIGTERM"), 1, worker="engine 1") == 1
    assert messages == [
        "engine 1 was lost (process 17 was ended by SIGKILL); restarting it (restart 1 of 5)",
        "the trainer was lost (process 18 was ended by SIGBUS); restarting it (restart 1 of 5)",
        "engine 1 was lost (process 19 was ended by SIGTERM); restarting it in 1 s (restart 2 of 5)",
    ]


def test_backoff_doubles_up_to_a_limit_until_a_step_is_done():
    clock, budget = 0.0, make_budget(max_restarts=100, backoff_seconds=2, max_backoff_seconds=10)
    waits = []
    for n in range(6):
        waits.append(budget.spend("engine", make_death(how="abcdef"[n]), 7))
        clock += waits[-1]
    assert waits == [0, 2, 4, 8, 10, 10]
    assert clock == 34
    budget.mark_step_done(7)
    assert [budget.spend("engine", make_death(), 8), budget.spend("engine", make_death(), 8)] == [0, 2]


def test_backoff_and_failures_are_counted_per_worker():
    budget = make_budget(max_restarts=100)
    assert [budget.spend("engine", make_death(n), 1, worker=f"engine {n}") for n in range(16)] == [0] * 16


def test_restart_budget_is_spent_per_kind_across_steps():
    budget = make_budget(max_restarts=3)
    for step in (1, 2, 3):
        budget.spend("engine", make_death(), step)
        budget.spend("trainer", make_death(), step)
        budget.mark_step_done(step)
    message = r"^step 4: the engine was lost after 3 restarts of this kind \(recovery.max_restarts: 3\): process 1 was "
    with pytest.raises(WorkerError, match=message):
        budget.spend("engine", make_death(), 4)
    assert budget.counts == {"engine": 3, "trainer": 3}


def test_restarts_of_an_earlier_process_count():
    with pytest.raises(WorkerError, match="after 3 restarts"):
        make_budget(counts={"engine": 3}, max_restarts=3).spend("engine", make_death(), 4)


def test_cause_is_raised_unchanged_if_restarts_are_disabled():
    cause = WeightSyncError("round 3: late")
    with pytest.raises(WeightSyncError) as error:
        make_budget(max_restarts=0).spend("engine", cause, 1)
    assert error.value is cause


def test_identical_failures_abort_regardless_of_numbers_in_messages():
    budget = make_budget(max_identical_failures=3)
    budget.spend("engine", make_death(17), 2)
    budget.spend("engine", make_death(18), 2)
    with pytest.raises(WorkerError, match=r"(?s)^step 2: the engine was lost 3 times for the same .*last words"):
        budget.spend("engine", make_death(19), 2)


def test_completed_step_or_different_failure_resets_identical_failures():
    budget = make_budget(max_identical_failures=2, max_restarts=100)
    for step in range(1, 5):
        budget.spend("engine", make_death(), step)
        budget.spend("engine", make_death(how="SIGBUS"), step)
        budget.spend("trainer", make_death(), step)
        budget.mark_step_done(step)


def test_repeated_step_does_not_reset_identical_failures():
    budget = make_budget(max_identical_failures=3, max_restarts=100)
    budget.mark_step_done(6)
    for _ in range(2):
        budget.spend("trainer", make_death(), 7)
        budget.mark_step_done(5)
        budget.mark_step_done(6)
    with pytest.raises(WorkerError, match="3 times for the same reason"):
        budget.spend("trainer", make_death(), 7)


def test_failures_that_differ_in_addresses_and_ids_are_identical():
    budget = make_budget(max_identical_failures=2)
    budget.spend("engine", WorkerError("engine 0 died. actor_id: ab12cd34ef56ab12\nip: 10.0.0.1 at 0x7f00"), 1)
    with pytest.raises(WorkerError, match="2 times"):
        budget.spend("engine", WorkerError("engine 0 died. actor_id: 0912cd34ef56abff\nip: 10.0.0.27 at 0xa"), 1)
