"""Engines and rollout workers that die or stand still: the same completions, weights and requests as without."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.groups.rollout_group import FinishedGroup
from megarl.rollout.engine import Sampling
from megarl.rollout.rollout_worker import RetryCounts
from megarl.supervision.restart_budget import RestartBudget
from tests.end_to_end.components import SMALL_BUCKETS, Pieces, build
from tests.end_to_end.test_components import differing
from tests.end_to_end.tiny_world import run_tree

LONG = Sampling(temperature=1.0, max_new_tokens=100)
ROLLOUT: dict[str, Any] = {"max_new_tokens": 100}
APART = {"slots_per_node": 2, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}


@dataclass(frozen=True)
class Undertaking:
    """A run's parts, and what it has said."""

    pieces: Pieces
    said: list[str]

    def collect(self, label: str) -> list[FinishedGroup]:
        """The same prompts with the same seed each time."""
        prompts = self.pieces.prompts[:8]
        groups = self.pieces.rollout.collect(prompts, num_samples=4, sampling=LONG, label=label, seed=(1, 2))
        assert [group.summary.group_id for group in groups] == list(range(8))  # none lost, none twice
        return groups

    def scheduler(self, replica: int = 0) -> int:
        (health,) = self.pieces.engines.select([replica]).call("health")
        (pid,) = health.scheduler_pids
        return int(pid)

    def retry_counts(self) -> RetryCounts:
        (worker,) = self.pieces.rollout._workers
        found: RetryCounts = ray.get(worker.invoke.remote("retry_counts"))
        return found

    def assert_whole(self, folder: Path, version: int) -> None:
        """All engines hold the trainer's weights, bit by bit, as `version`."""
        folder.mkdir()
        exported = self.pieces.exported(folder / "exported")
        engines = self.pieces.engines
        for replica in range(len(engines.engines)):
            pieces = Pieces(**{**vars(self.pieces), "engines": engines.select([replica])})
            assert differing(pieces.served(folder / f"served-{replica}"), exported) == []
        assert [health.policy_version for health in engines.call("health")] == [version] * len(engines.engines)


@contextmanager
def undertaking(world: Path, folder: Path, **sections: Any) -> Iterator[Undertaking]:
    config = RunConfig.model_validate(run_tree(world, folder, **(SMALL_BUCKETS | {"rollout": ROLLOUT} | sections)))
    pieces, said = build(config), []

    def say(text: str) -> None:
        logging.getLogger(__name__).info(text)
        said.append(text)

    try:
        pieces.engines.supervisor.restart_budget = RestartBudget(config.recovery, say)
        pieces.weights.push(0)
        pieces.train(pieces.sample("train"))  # so that the model's folder is not what is to be served
        pieces.weights.push(1)
        yield Undertaking(pieces, said)
    finally:
        pieces.close()


@pytest.fixture(scope="module")
def undertaken(cluster: None, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undertaking]:
    with undertaking(world, tmp_path_factory.mktemp("lost") / "run") as one:
        yield one


@contextmanager
def soon(disturb: Callable[[], None], seconds: float = 0.4) -> Iterator[None]:
    """`disturb` happens during the block."""
    timer = threading.Timer(seconds, disturb)
    timer.start()
    yield
    assert timer.finished.is_set()
    timer.join()


def kill(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def fetched(groups: Sequence[FinishedGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.payload.fetch()]


def assert_same(first: Sequence[FinishedGroup], second: Sequence[FinishedGroup]) -> None:
    pairs = list(zip(fetched(first), fetched(second), strict=True))
    assert len(pairs) == 32
    for a, b in pairs:
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
        assert (a.prompt_id, a.group_id, a.reward, a.finish_reason) == (
            b.prompt_id,
            b.group_id,
            b.reward,
            b.finish_reason,
        )


def gone(*pids: int, within: float = 10) -> None:
    end = time.monotonic() + within
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        time.sleep(0.05)


def test_a_killed_scheduler_costs_time_and_nothing_else(undertaken: Undertaking, tmp_path: Path) -> None:
    undisturbed, scheduler = undertaken.collect("undisturbed"), undertaken.scheduler()
    host = psutil.Process(scheduler).ppid()
    before = undertaken.retry_counts()
    with soon(kill(scheduler)):
        disturbed = undertaken.collect("disturbed")
    assert_same(undisturbed, disturbed)
    assert undertaken.retry_counts().num_retried > before.num_retried
    lost, back = undertaken.said[-2:]
    assert lost == (
        "engine 0 was lost (the engine's scheduler process of TP rank 0 was ended by SIGKILL); "
        "restarting it (restart 1 of 20)"
    )
    assert back.startswith("engine 0 is serving again, ")
    undertaken.assert_whole(tmp_path / "whole", 1)
    gone(scheduler, host)


@pytest.mark.slow
def test_a_killed_rollout_worker_costs_time_and_nothing_else(undertaken: Undertaking) -> None:
    undisturbed = undertaken.collect("with-a-worker")
    (worker,) = undertaken.pieces.rollout._workers
    pid: int = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
    with soon(kill(pid)):
        disturbed = undertaken.collect("without")
    assert_same(undisturbed, disturbed)
    assert undertaken.said[-1].startswith("rollout worker 0 was lost (rollout: rollout worker 0 died. ")
    assert undertaken.said[-1].endswith("); restarting it (restart 1 of 20)")
    gone(pid)


@pytest.mark.slow
def test_a_rollout_worker_that_stands_still_is_replaced(cluster: None, world: Path, tmp_path: Path) -> None:
    with undertaking(world, tmp_path / "run", recovery={"engine_stall_seconds": 4.0}) as one:
        undisturbed = one.collect("undisturbed")
        (worker,) = one.pieces.rollout._workers
        pid: int = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
        with soon(lambda: os.kill(pid, signal.SIGSTOP)):
            disturbed = one.collect("disturbed")
        assert_same(undisturbed, disturbed)
        assert one.said[0].startswith("rollout worker 0 has not answered a ping for 4 s (recovery.engine_stall_secon")
        assert one.said[1].startswith("rollout worker 0 was lost (rollout: rollout worker 0 died. ")
        gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "host"])
def test_another_replica_does_what_a_killed_one_had(victim: str, cluster: None, world: Path, tmp_path: Path) -> None:
    rollout = ROLLOUT | {"replicas": 2}
    with undertaking(world, tmp_path / "run", rollout=rollout) as one:
        undisturbed, scheduler = one.collect("undisturbed"), one.scheduler(1)
        host = psutil.Process(scheduler).ppid()
        with soon(kill(scheduler if victim == "scheduler" else host)):
            disturbed = one.collect("disturbed")
        assert_same(undisturbed, disturbed)
        assert one.pieces.engines.supervisor.serving == [0]
        assert one.retry_counts().num_retried > 0
        one.pieces.weights.push(1)  # the one that is up gets it
        while one.pieces.engines.supervisor.serving != [0, 1]:
            assert_same(undisturbed, one.collect("meanwhile"))
        assert_same(undisturbed, one.collect("both"))
        one.pieces.weights.push(2)
        one.assert_whole(tmp_path / "whole", 2)
        gone(scheduler, host)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "host"])
def test_an_engine_that_stands_still_is_replaced(victim: str, cluster: None, world: Path, tmp_path: Path) -> None:
    with undertaking(world, tmp_path / "run", recovery={"engine_stall_seconds": 4.0}) as one:
        undisturbed, scheduler = one.collect("undisturbed"), one.scheduler()
        host = psutil.Process(scheduler).ppid()
        stopped = scheduler if victim == "scheduler" else host
        with soon(lambda: os.kill(stopped, signal.SIGSTOP)):
            disturbed = one.collect("disturbed")
        assert_same(undisturbed, disturbed)
        assert one.said[0].startswith(
            "engine 0 was lost (engine 0 has not answered a ping for 4 s (recovery.engine_stall_seconds)); "
        )
        one.assert_whole(tmp_path / "whole", 1)
        gone(scheduler, host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("exact", {}),
        ("exact", {"placement": APART}),
        ("gather_hf", {"trainer": {"steps": 50, "optimizer": {"lr": 1e-3}, "parallel": {"tp": 2}}}),
    ],
    ids=["beside", "apart", "whole tensors of two ranks"],
)
def test_a_push_is_made_again_when_an_engine_dies_in_it(
    strategy: str, sections: dict[str, Any], cluster: None, world: Path, tmp_path: Path
) -> None:
    sections = sections | {"weight_sync": {"strategy": strategy, "bucket_bytes": 60_000, "timeout_seconds": 20}}
    with undertaking(world, tmp_path / "run", **sections) as one:
        undisturbed, scheduler = one.collect("undisturbed"), one.scheduler()
        rank: int = ray.get(one.pieces.processes.actors[1].__ray_call__.remote(lambda _: os.getpid()))

        def disturb() -> None:
            os.kill(scheduler, signal.SIGKILL)
            time.sleep(1.0)
            os.kill(rank, signal.SIGCONT)

        os.kill(rank, signal.SIGSTOP)
        with soon(disturb):
            one.pieces.weights.push(2)
        assert len([text for text in one.said if text.startswith("engine 0 was lost")]) == 1
        assert one.pieces.weights.policy_version == 2
        one.assert_whole(tmp_path / "whole", 2)
        again = one.collect("again")
        assert {t.max_policy_version for g in again for t in g.summary.trajectories} == {2}
        tokens = [[t.token_ids.tolist() for t in fetched(groups)] for groups in (undisturbed, again)]
        assert tokens[0] == tokens[1]
        gone(scheduler)
