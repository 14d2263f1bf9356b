"""Engines and rollout workers that die or hang: completions and weights are the same as in an undisturbed run."""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.engines.engine import Sampling
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.supervision.restart_budget import RestartBudget
from tests.end_to_end.components import SMALL_BUCKETS, Components, SharedRanks, engine_host, started
from tests.end_to_end.launched import has_ended
from tests.end_to_end.test_components import differing
from tests.end_to_end.tiny_world import run_tree
from tests.time_limits import HANG_SECONDS, wait_until

LONG = Sampling(temperature=1.0, max_new_tokens=100)
ROLLOUT: dict[str, Any] = {"max_new_tokens": 100}
DISAGGREGATED = {"slots_per_node": 2, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}


@dataclass(frozen=True)
class StartedRun:
    """Components of a run and the messages that it has sent to the user."""

    components: Components
    messages: list[str]

    def collect(self, label: str) -> list[FinishedGroup]:
        """Sample the same prompts with the same seed each time."""
        prompts = self.components.prompts[:8]
        groups = self.components.rollout.collect(prompts, num_samples=4, sampling=LONG, label=label, seed=(1, 2))
        assert [group.summary.group_id for group in groups] == list(range(8))  # no group is lost or duplicated
        return groups

    def scheduler(self, replica: int = 0) -> int:
        (health,) = self.components.engines.select([replica]).call("health")
        return int(health.scheduler_pids[0])

    def assert_engines_hold_weights(self, folder: Path, version: int) -> None:
        """Check that all engines hold the trainer's weights bitwise, as policy version `version`."""
        folder.mkdir()
        exported = self.components.exported(folder / "exported")
        engines = self.components.engines
        for replica in range(len(engines.engines)):
            components = Components(**{**vars(self.components), "engines": engines.select([replica])})
            assert differing(components.served(folder / f"served-{replica}"), exported) == []
        assert [health.policy_version for health in engines.call("health")] == [version] * len(engines.engines)


def begin_run(components: Components) -> StartedRun:
    """Serve weights of version 1 that differ from those in the model's folder, with messages of restarts recorded."""
    messages: list[str] = []

    def notify(text: str) -> None:
        logging.getLogger(__name__).info(text)
        messages.append(text)

    budget = RestartBudget(components.config.recovery, notify)
    components.engines.supervisor.restart_budget = components.rollout.workers.restart_budget = budget
    components.weights.push(0)
    components.train(components.sample("train"))
    components.weights.push(1)
    return StartedRun(components, messages)


@contextmanager
def started_run(world: Path, folder: Path, ranks: SharedRanks | None = None, **sections: Any) -> Iterator[StartedRun]:
    config = RunConfig.model_validate(run_tree(world, folder, **(SMALL_BUCKETS | {"rollout": ROLLOUT} | sections)))
    with started(config, ranks) as components:
        yield begin_run(components)


@pytest.fixture(scope="module")
def shared_run(components: Components) -> StartedRun:
    return begin_run(components)


@contextmanager
def in_thread(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in a thread during the block; raises what it raised."""
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        yield
        acting.result(HANG_SECONDS)


@contextmanager
def happening_during(run: StartedRun, disturb: Callable[[], None], replica=0, *, continues=True) -> Iterator[None]:
    """Call `disturb` during the block, once the engine has requests; it finishes none before.

    Args:
        continues: let the engine's scheduler, if it still lives, continue afterwards.
    """
    scheduler, handle = run.scheduler(replica), run.components.engines.engines[replica].handle

    def num_requests() -> int:
        count: int = ray.get(handle.__ray_call__.remote(lambda host: host.worker.batches.num_unfinished))
        return count

    def act() -> None:
        disturbed = False
        try:
            assert wait_until(lambda: num_requests() > 0)
            disturb()
            disturbed = True
        finally:
            with suppress(ProcessLookupError):
                if continues or not disturbed:
                    os.kill(scheduler, signal.SIGCONT)

    os.kill(scheduler, signal.SIGSTOP)
    with in_thread(act):
        yield


def kill(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def fetch_trajectories(groups: Sequence[FinishedGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.payload.fetch()]


def assert_same(first: list[FinishedGroup], second: list[FinishedGroup], *, logprob_difference=0.0) -> None:
    """Check that all completions are the same, up to this difference of log-probabilities."""
    pairs = list(zip(fetch_trajectories(first), fetch_trajectories(second), strict=True))
    assert len(pairs) == 32
    for a, b in pairs:
        for name in ("token_ids", "loss_mask", "policy_versions"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
        assert np.abs(a.logprobs - b.logprobs).max() <= logprob_difference
        for name in ("prompt_id", "group_id", "reward", "finish_reason"):
            assert getattr(a, name) == getattr(b, name), name


def has_gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def assert_processes_gone(*pids: int) -> None:
    assert wait_until(lambda: all(map(has_gone, pids)))


def test_killed_scheduler_is_restarted_without_changing_results(shared_run, tmp_path):
    scheduler, undisturbed = shared_run.scheduler(), shared_run.collect("undisturbed")
    host = engine_host(scheduler)
    with happening_during(shared_run, kill(scheduler)):
        disturbed = shared_run.collect("disturbed")
    assert_same(undisturbed, disturbed)
    assert any(group.summary.num_retried for group in disturbed)
    lost, back = shared_run.messages[-2:]
    assert lost.startswith("engine 0 was lost (the engine's scheduler process of TP rank 0 was ended by SIGKILL); ")
    assert lost.endswith(" (restart 1 of 20)")
    assert back.startswith("engine 0 is serving again, ")
    shared_run.assert_engines_hold_weights(tmp_path / "weights", 1)
    assert_processes_gone(scheduler, host)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rollout_worker_is_replaced_without_changing_results(how, ranks, world, tmp_path):
    with started_run(world, tmp_path / "run", ranks, recovery={"engine_stall_seconds": 4.0}) as one:
        undisturbed = one.collect("undisturbed")
        (worker,) = one.components.rollout.workers
        pid: int = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
        with happening_during(one, lambda: os.kill(pid, how)):
            disturbed = one.collect("disturbed")
        assert_same(undisturbed, disturbed)
        *before, lost = one.messages
        assert lost.startswith("rollout worker 0 was lost (rollout: rollout worker 0 died. ")
        assert lost.endswith("); restarting it (restart 1 of 20)")
        silent = "rollout worker 0 has not answered a ping for 4 s (recovery.engine_stall_seconds); killing it"
        assert before == [silent] * (how == signal.SIGSTOP)
        assert_processes_gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "host"])
def test_another_replica_takes_the_requests_of_a_killed_one(victim, ranks, world, tmp_path):
    rollout = ROLLOUT | {"replicas": 2}
    with started_run(world, tmp_path / "run", ranks, rollout=rollout) as one:
        undisturbed, scheduler = one.collect("undisturbed"), one.scheduler(1)
        host = engine_host(scheduler)
        with happening_during(one, kill(scheduler if victim == "scheduler" else host), replica=1):
            disturbed = one.collect("disturbed")
        assert_same(undisturbed, disturbed)
        assert one.components.engines.supervisor.serving == [0]
        assert any(group.summary.num_retried for group in disturbed)
        one.components.weights.push(1)  # only the serving replica receives it
        while one.components.engines.supervisor.serving != [0, 1]:
            assert_same(undisturbed, one.collect("meanwhile"))
        assert_same(undisturbed, one.collect("both"))
        one.components.weights.push(2)
        one.assert_engines_hold_weights(tmp_path / "weights", 2)
        assert_processes_gone(scheduler, host)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "host"])
def test_hung_engine_is_replaced(victim, ranks, world, tmp_path):
    with started_run(world, tmp_path / "run", ranks, recovery={"engine_stall_seconds": 4.0}) as one:
        undisturbed, scheduler = one.collect("undisturbed"), one.scheduler()
        host = engine_host(scheduler)
        stopped = scheduler if victim == "scheduler" else host
        with happening_during(one, lambda: os.kill(stopped, signal.SIGSTOP), continues=False):
            disturbed = one.collect("disturbed")
        # requests may be old enough to continue after tokens that were reported before
        assert_same(undisturbed, disturbed, logprob_difference=1e-4)
        assert one.messages[0].startswith(
            "engine 0 was lost (engine 0 has not answered a ping for 4 s (recovery.engine_stall_seconds)); "
        )
        one.assert_engines_hold_weights(tmp_path / "weights", 1)
        assert_processes_gone(scheduler, host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("exact", {}),
        ("exact", {"placement": DISAGGREGATED}),
        ("gather_hf", {"trainer": {"steps": 50, "optimizer": {"lr": 1e-3}, "parallel": {"tp": 2}}}),
    ],
    ids=["colocated", "disaggregated", "full tensors of two ranks"],
)
def test_push_is_retried_if_an_engine_dies_during_it(strategy, sections, cluster, world, tmp_path):
    sections = sections | {"weight_sync": {"strategy": strategy, "bucket_bytes": 60_000, "abort_seconds": 10.0}}
    with started_run(world, tmp_path / "run", **sections) as one:
        undisturbed, scheduler = one.collect("undisturbed"), one.scheduler()
        rank: int = ray.get(one.components.processes.actors[1].__ray_call__.remote(lambda _: os.getpid()))

        sync = one.components.weights
        updates = sync.num_updates

        def disturb():
            assert wait_until(lambda: sync.num_updates > updates)
            os.kill(scheduler, signal.SIGKILL)
            os.kill(rank, signal.SIGCONT)

        os.kill(rank, signal.SIGSTOP)
        with in_thread(disturb):
            one.components.weights.push(2)
        assert len([text for text in one.messages if text.startswith("engine 0 was lost")]) == 1
        assert one.components.weights.policy_version == 2
        one.assert_engines_hold_weights(tmp_path / "weights", 2)
        again = one.collect("again")
        assert {t.tokens_by_version[-1][0] for g in again for t in g.summary.trajectories} == {2}
        tokens = [[t.token_ids.tolist() for t in fetch_trajectories(groups)] for groups in (undisturbed, again)]
        assert tokens[0] == tokens[1]
        assert_processes_gone(scheduler)
