import pytest

from megarl.config.recovery import RecoveryConfig
from megarl.errors import MegarlError, WeightSyncError, WorkerError
from megarl.supervision.restart_budget import RestartBudget


def died(pid=1, how="SIGKILL"):
    return WorkerError(f"process {pid} was ended by {how}; the end of /logs/{pid}.log:\nlast words {how * pid}")


def make_budget(said=None, counts=None, **config):
    return RestartBudget(RecoveryConfig(**config), [].append if said is None else said.append, counts)


def test_the_user_is_told_what_was_lost_and_how_often():
    said = []
    budget = make_budget(said, max_restarts=5)
    assert budget.spend("engine", died(17), 1, worker="engine 1") == 0
    assert budget.spend("trainer", died(18, "SIGBUS"), 1) == 0
    assert budget.spend("engine", died(19, "SIGTERM"), 1, worker="engine 1") == 1
    assert said == [
        "engine 1 was lost (process 17 was ended by SIGKILL); restarting it (restart 1 of 5)",
        "the trainer was lost (process 18 was ended by SIGBUS); restarting it (restart 1 of 5)",
        "engine 1 was lost (process 19 was ended by SIGTERM); restarting it in 1 s (restart 2 of 5)",
    ]


def test_waits_double_up_to_a_limit_until_a_step_is_done():
    clock, budget = 0.0, make_budget(max_restarts=100, backoff_seconds=2, max_backoff_seconds=10)
    waits = []
    for n in range(6):
        waits.append(budget.spend("engine", died(how="abcdef"[n]), 7))
        clock += waits[-1]
    assert waits == [0, 2, 4, 8, 10, 10]
    assert clock == 34
    budget.mark_step_done(7)
    assert [budget.spend("engine", died(), 8), budget.spend("engine", died(), 8)] == [0, 2]


def test_each_of_a_kind_has_its_own_waits_and_failures():
    budget = make_budget(max_restarts=100)
    assert [budget.spend("engine", died(n), 1, worker=f"engine {n}") for n in range(16)] == [0] * 16


def test_a_run_has_so_many_restarts_of_a_kind_however_many_steps_it_finishes():
    budget = make_budget(max_restarts=3)
    for step in (1, 2, 3):
        budget.spend("engine", died(), step)
        budget.spend("trainer", died(), step)
        budget.mark_step_done(step)
    says = r"^step 4: the engine was lost after 3 restarts of this kind \(recovery.max_restarts: 3\): process 1 was "
    with pytest.raises(WorkerError, match=says):
        budget.spend("engine", died(), 4)
    assert budget.counts == {"engine": 3, "trainer": 3}


def test_what_an_earlier_process_has_used_counts():
    with pytest.raises(WorkerError, match="after 3 restarts"):
        make_budget(counts={"engine": 3}, max_restarts=3).spend("engine", died(), 4)


def test_without_restarts_the_cause_is_raised_as_it_is():
    cause: MegarlError = WeightSyncError("round 3: late")
    with pytest.raises(WeightSyncError) as error:
        make_budget(max_restarts=0).spend("engine", cause, 1)
    assert error.value is cause


def test_the_same_failure_again_and_again_is_fatal_whatever_its_numbers():
    budget = make_budget(max_identical_failures=3)
    budget.spend("engine", died(17), 2)
    budget.spend("engine", died(18), 2)
    with pytest.raises(WorkerError, match=r"(?s)^step 2: the engine was lost 3 times for the same .*last words"):
        budget.spend("engine", died(19), 2)


def test_a_finished_step_or_another_failure_is_something_else():
    budget = make_budget(max_identical_failures=2, max_restarts=100)
    for step in range(1, 5):
        budget.spend("engine", died(), step)
        budget.spend("engine", died(how="SIGBUS"), step)
        budget.spend("trainer", died(), step)
        budget.mark_step_done(step)


def test_a_step_that_is_done_again_is_not_a_new_one():
    budget = make_budget(max_identical_failures=3, max_restarts=100)
    budget.mark_step_done(6)
    for _ in range(2):
        budget.spend("trainer", died(), 7)
        budget.mark_step_done(5)
        budget.mark_step_done(6)
    with pytest.raises(WorkerError, match="3 times for the same reason"):
        budget.spend("trainer", died(), 7)


def test_addresses_and_ids_do_not_make_failures_different():
    budget = make_budget(max_identical_failures=2)
    budget.spend("engine", WorkerError("engine 0 died. actor_id: ab12cd34ef56ab12\nip: 10.0.0.1 at 0x7f00"), 1)
    with pytest.raises(WorkerError, match="2 times"):
        budget.spend("engine", WorkerError("engine 0 died. actor_id: 0912cd34ef56abff\nip: 10.0.0.27 at 0xa"), 1)
