import random

import pytest

from megarl.config.run import RecoveryConfig
from megarl.errors import LostLockError, RestartLimitError, WeightSyncError, WorkerError
from megarl.run.supervision import restart_budget
from megarl.run.supervision.restart_budget import RESTARTS_FILE, RestartBudget, RestartLog
from tests.errors import expect_error


def make_death(pid=1, how="SIGKILL"):
    return WorkerError(f"process {pid} was ended by {how}; the end of /logs/{pid}.log:\nlast words {how * pid}")


def make_budget(messages=None, log=None, last_step=0, **config):
    notify = [].append if messages is None else messages.append
    return RestartBudget(RecoveryConfig(**config), notify, log, last_step=last_step)


class Clock:
    """Stands in for the module `time`: the wall clock may jump, the monotonic one begins elsewhere in each process."""

    def __init__(self):
        self.wall, self.uptime = 1_768_471_200.0, 50.0

    def time(self):
        return self.wall

    def monotonic(self):
        return self.uptime

    def advance(self, seconds):
        self.wall += seconds
        self.uptime += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(restart_budget, "time", found)
    return found


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
    budget = make_budget(max_restarts=100)
    waits = [budget.spend("engine", make_death(how=how), 7) for how in "abcdefghi"]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    budget.mark_step_done(7)
    assert [budget.spend("engine", make_death(), 8), budget.spend("engine", make_death(), 8)] == [0, 1]


def test_backoff_and_failures_are_counted_per_worker():
    budget = make_budget(max_restarts=100)
    assert [budget.spend("engine", make_death(n), 1, worker=f"engine {n}") for n in range(16)] == [0] * 16


def test_restart_budget_is_spent_per_kind_across_steps():
    budget = make_budget(max_restarts=3)
    for step in (1, 2, 3):
        budget.spend("engine", make_death(), step)
        budget.spend("trainer", make_death(), step)
        budget.mark_step_done(step)
    with pytest.raises(RestartLimitError) as error:
        budget.spend("engine", make_death(), 4)
    assert str(error.value).startswith(
        "step 4: the engine was lost after 3 restarts of this kind "
        "(recovery.max_restarts: 3, within 24 h): process 1 was ended by SIGKILL"
    )
    with expect_error(RestartLimitError, "(recovery.max_restarts", "1", "2"):
        make_budget(max_restarts=1).spend_each("engine", dict.fromkeys("abc", make_death()), 1, num_processes=2)


DAY = 86_400.0


def simulate(clock, rng, budget, *, losses, num_processes, max_restarts):
    """Lose processes at random times with a step between; return whether each loss was restarted, and what is right."""
    times, found, expected = [], [], []
    for step in range(1, losses + 1):
        clock.advance(rng.choice([0.0, 1.0, DAY / 10, rng.expovariate(num_processes / DAY)]))
        lost = rng.choice([1, 1, 1, rng.randint(1, num_processes)])
        causes = {f"engine {n}": make_death() for n in range(lost)}
        recent = sum(clock.uptime - each < DAY for each in times)
        expected.append(recent + lost <= max_restarts * num_processes)
        try:
            budget.spend_each("engine", causes, step, num_processes=num_processes)
            times += [clock.uptime] * lost
            found.append(True)
        except RestartLimitError:
            found.append(False)
        budget.mark_step_done(step)
    return found, expected


def test_the_limit_is_that_of_a_sliding_window(clock):
    rng = random.Random(0)
    outcomes = set()
    for _ in range(200):
        max_restarts, num_processes = rng.randint(1, 4), rng.randint(1, 8)
        budget = make_budget(max_restarts=max_restarts)
        found, expected = simulate(
            clock, rng, budget, losses=60, num_processes=num_processes, max_restarts=max_restarts
        )
        assert found == expected
        outcomes.update(found)
    assert outcomes == {True, False}


def test_a_thousand_engines_with_a_loss_a_day_each_continue_for_ever(clock):
    """Three weeks of a run with a step each minute; a rack of 40 engines is lost each day besides."""
    rng, budget, step, num_lost = random.Random(1), make_budget(), 0, 0
    for _ in range(21):
        budget.spend_each("engine", {f"engine {n}": make_death() for n in range(40)}, step + 1, num_processes=1000)
        for _ in range(24 * 60):
            clock.advance(60.0)
            for _ in range(rng.choice([0, 0, 0, 1, 1, 2]) if rng.random() < 0.99 else 20):
                num_lost += 1
                budget.spend("engine", make_death(), step + 1, worker=f"engine {num_lost % 1000}", num_processes=1000)
            step += 1
            budget.mark_step_done(step)
    assert num_lost > 21 * 900


@pytest.mark.parametrize("num_engines", [1, 1000])
def test_a_run_that_only_crashes_ends(clock, num_engines):
    """No step is completed, and no two failures are identical."""
    budget, begun, num_restarts = make_budget(), clock.uptime, 0

    def crash():
        how = "".join(chr(ord("a") + int(digit)) for digit in str(num_restarts))
        causes = {f"engine {n}": make_death(how=how) for n in range(num_engines)}
        clock.advance(10 + max(budget.spend_each("engine", causes, 1, num_processes=num_engines)))

    while num_restarts < 20:
        crash()
        num_restarts += 1
    with pytest.raises(RestartLimitError):
        crash()
    assert clock.uptime - begun < 3600
    assert [budget.spend("trainer", make_death(), 1) for _ in range(2)] == [0, 1]
    with expect_error(RestartLimitError, "3", "reason", "times"):
        budget.spend("trainer", make_death(), 1)


def test_processes_lost_together_are_reported_in_one_line():
    messages = []
    budget = make_budget(messages, max_restarts=5)
    budget.spend("engine", make_death(), 1, worker="engine 1", num_processes=8)
    causes = {f"engine {n}": make_death(n, "SIGBUS" if n == 3 else "SIGKILL") for n in range(5)}
    assert budget.spend_each("engine", causes, 1, num_processes=8) == [0, 1, 0, 0, 0]
    two = dict.fromkeys(("rollout worker 1", "rollout worker 2"), make_death())
    budget.spend_each("rollout worker", two, 1, num_processes=2)
    assert messages[1:] == [
        "5 engines (engine 0, engine 1, engine 2 and 2 others) were lost (process 0 was ended by SIGKILL; 1 for other "
        "reasons); restarting them in up to 1 s (restarts 2 to 6 of 40)",
        "2 rollout workers (rollout worker 1, rollout worker 2) were lost (process 1 was ended by SIGKILL); restarting "
        "them (restarts 1 to 2 of 10)",
    ]


def test_a_restarted_controller_counts_the_restarts_before_it(clock, tmp_path):
    """With the clock of another node: the file has wall times, and each process its own monotonic clock."""
    log = RestartLog(tmp_path / RESTARTS_FILE)
    log.begin()
    budget = make_budget(log=log, max_restarts=2)
    budget.spend_each("engine", dict.fromkeys(("engine 0", "engine 1"), make_death()), 1, num_processes=2)
    clock.advance(DAY / 2)
    budget.spend("engine", make_death(), 7, worker="engine 0", num_processes=2)
    clock.uptime = 3.0
    restarted = make_budget(log=log, last_step=5, max_restarts=2)
    restarted.spend("engine", make_death(), 7, worker="engine 1", num_processes=2)
    with expect_error(RestartLimitError, "4", "restarts", "after"):
        restarted.spend("engine", make_death(), 7, worker="engine 1", num_processes=2)
    clock.advance(DAY / 2)
    restarted.spend("engine", make_death(), 7, worker="engine 1", num_processes=2)
    log.begin()  # the user has resumed the run
    assert log.read() == []
    make_budget(log=log, max_restarts=1).spend("engine", make_death(), 7)


@pytest.mark.parametrize("jump", [-10 * 365 * DAY, -60.0, 60.0, 10 * 365 * DAY])
def test_a_clock_that_jumps_delays_no_restart_by_more_than_a_window(clock, tmp_path, jump):
    log = RestartLog(tmp_path / RESTARTS_FILE)
    budget = make_budget(log=log, max_restarts=1)
    budget.spend("engine", make_death(), 1)
    clock.wall += jump
    with pytest.raises(RestartLimitError):  # the process that counts does not look at the wall clock
        budget.spend("engine", make_death(how="SIGBUS"), 1)
    restarted = make_budget(log=log, max_restarts=1)
    if jump < DAY:
        with pytest.raises(RestartLimitError):
            restarted.spend("engine", make_death(how="SIGBUS"), 1)
    clock.advance(DAY + 1)
    restarted.spend("engine", make_death(how="SIGBUS"), 1)


def test_identical_failures_and_backoff_continue_in_a_restarted_controller(tmp_path):
    log, lost = RestartLog(tmp_path / RESTARTS_FILE), WorkerError("its process has ended")
    waits = [make_budget(log=log, last_step=20).spend("controller", lost, 21) for _ in range(2)]
    assert waits == [0, 1]
    with expect_error(RestartLimitError, "3", "controller", "reason"):
        make_budget(log=log, last_step=20).spend("controller", lost, 21)
    assert make_budget(log=log, last_step=25).spend("controller", lost, 26) == 0  # there is another checkpoint


def test_a_line_that_a_kill_has_cut_short_is_ignored(tmp_path):
    path = tmp_path / RESTARTS_FILE
    log = RestartLog(path)
    log.begin()
    for step in (1, 2):
        make_budget(log=log).spend("engine", make_death(), step, worker=f"engine {step}")
    whole = path.read_bytes()
    begin = whole[:-1].rfind(b"\n") + 1
    for end in range(begin, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [event.step for event in log.read()] == [1]
        make_budget(log=log).spend("trainer", make_death(), 3)
        assert [event.kind for event in log.read()] == ["engine", "trainer"]


def test_a_log_that_cannot_be_written_is_reported_once_and_a_lost_folder_ends_the_run(tmp_path):
    messages, folder = [], tmp_path / RESTARTS_FILE
    folder.mkdir()
    budget = make_budget(messages, max_restarts=9)
    budget._log = RestartLog(folder)
    budget.spend("engine", make_death(), 1)
    budget.spend("trainer", make_death(), 1)
    reports = [text for text in messages if text.startswith("restarts.jsonl cannot be written")]
    assert len(reports) == 1

    def refuse():
        raise LostLockError("another run has the folder")

    with pytest.raises(LostLockError):
        make_budget(log=RestartLog(tmp_path / "other", refuse)).spend("engine", make_death(), 1)


def test_cause_is_raised_unchanged_if_restarts_are_disabled():
    cause = WeightSyncError("round 3: late")
    with pytest.raises(WeightSyncError) as error:
        make_budget(max_restarts=0).spend("engine", cause, 1)
    assert error.value is cause


def test_identical_failures_abort_regardless_of_numbers_in_messages():
    budget = make_budget(max_identical_failures=3)
    budget.spend("engine", make_death(17), 2)
    budget.spend("engine", make_death(18), 2)
    with expect_error(WorkerError, "2", "3", "engine", "times"):
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
    with expect_error(WorkerError, "3", "reason", "times"):
        budget.spend("trainer", make_death(), 7)


def test_failures_that_differ_in_addresses_and_ids_are_identical():
    budget = make_budget(max_identical_failures=2)
    budget.spend("engine", WorkerError("engine 0 died. actor_id: ab12cd34ef56ab12\nip: 10.0.0.1 at 0x7f00"), 1)
    with expect_error(WorkerError, "2", "times"):
        budget.spend("engine", WorkerError("engine 0 died. actor_id: 0912cd34ef56abff\nip: 10.0.0.27 at 0xa"), 1)
