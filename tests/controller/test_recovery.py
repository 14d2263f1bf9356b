"""Which failures restart a run, from which checkpoint, which lost nodes it waits for, what ends it; all simulated."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megarl import algorithms, errors
from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.controller import actor, recovery
from megarl.controller.actor import Controller
from megarl.controller.recovery import RunAssembly
from megarl.run.supervision import restart_budget
from megarl.tracking.progress import MessageEvent
from megarl.tracking.timing import Startup
from tests.errors import expect_error
from tests.run.finished_groups import run_config
from tests.time_limits import UNREACHED_SECONDS


class World:
    """A run of three steps; `failures`: step -> errors that it raises there in turn, with 0 for the assembly."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch, failures: dict[int, list[Any]]) -> None:
        self.failures, self.log = failures, list[Any]()
        self.saved: Path | None = None
        self.dead: errors.MegarlError | None = None
        """The loss of a trainer process that the controller finds when it looks."""
        sections = {"recovery": {"max_restarts": 5}, "trainer": {"steps": 3}}
        self.config = run_config({"type": "grpo"}, run_dir=str(tmp_path), **sections)
        world = self

        class RunAssembly:
            def __init__(self, *_: Any, restart_budget: Any, monitor: Any) -> None:
                world.restart_budget = restart_budget

            def assemble(self, start: Path | None, *, restarted: bool) -> Any:
                world.log.append((start.name if start else None, restarted))
                world.fail(0)
                return Mock(step=0, trainer=None)

            def find_lost_process(self, error: errors.MegarlError) -> errors.MegarlError | None:
                return world.dead

            def stop_trainer(self) -> None:
                world.log.append("ended")

            def replace_nodes(self) -> None:
                pass

        patch.setattr(recovery, "RunAssembly", RunAssembly)
        patch.setattr(algorithms, "find_algorithm", lambda kind: lambda: SimpleNamespace(train=self.train))
        runtime = SimpleNamespace(get_runtime_context=lambda: self.runtime_context)
        patch.setattr(actor, "ray", runtime)
        patch.setattr(restart_budget, "BACKOFF_SECONDS", 0.0)
        patch.setattr(recovery, "latest_valid", lambda *_: self.saved and SimpleNamespace(folder=self.saved))

    restart_budget: Any
    runtime_context: Any

    def fail(self, step: int) -> None:
        if self.failures.get(step):
            raise self.failures[step].pop(0)

    def train(self, run: Any, _: Any) -> None:
        for step in range(1, 4):
            run.step = step
            self.fail(step)
            self.restart_budget.mark_step_done(step)
            self.saved = Path(f"step-{step}")

    def run(self, resume: Path | None = None, *, restarted: bool = False) -> list[str]:
        self.runtime_context = SimpleNamespace(was_current_actor_reconstructed=restarted)
        controller = Controller(Startup(0.0), 0.0)
        controller.train(self.config, resume)
        first, *messages = [event.text for event in controller.events(0)[0] if isinstance(event, MessageEvent)]
        assert first == "starting trainer ranks and rollout engines"
        return messages

    def assert_fails(self, error: errors.MegarlError) -> None:
        """Check that the error ends the run without a restart."""
        with pytest.raises(type(error), match=f"^{error}$"):
            self.run()
        assert self.log == [(None, False)]


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[Any]]], World]:
    return partial(World, tmp_path, monkeypatch)


def lost_worker(what: str = "rank 1 died") -> errors.WorkerError:
    return errors.LostWorkerError(what)


def test_a_lost_trainer_restarts_from_the_newest_checkpoint(make_world):
    world = make_world({1: [lost_worker()], 3: [lost_worker("rank 0 died")]})
    messages = world.run()
    assert world.log == [(None, False), "ended", (None, True), "ended", ("step-2", True)]
    assert [text.partition(" was lost")[0] for text in messages] == ["the trainer", "the trainer"]


def test_a_restarted_controller_resumes_from_the_newest_checkpoint(make_world):
    world = make_world({})
    world.saved = Path("step-2")
    world.run(Path("step-1"), restarted=True)
    assert world.log == [("step-2", True)]
    world.saved, world.log = None, []
    world.run(Path("of-another-run"), restarted=True)
    assert world.log == [("of-another-run", True)]


def test_a_controller_that_dies_without_another_checkpoint_ends_the_run(make_world, tmp_path):
    world = make_world({})
    world.run()
    texts = [text for _ in range(2) for text in world.run(restarted=True)]
    assert texts == [
        "the controller was lost (its process has ended); restarting it (restart 1 of 5)",
        "the controller was lost (its process has ended); restarting it (restart 2 of 5)",
    ]
    with expect_error(errors.RestartLimitError, "1", "3", "controller", "reason"):
        world.run(restarted=True)
    (tmp_path / "checkpoints/step-000020").mkdir(parents=True)
    assert len(world.run(restarted=True)) == 1
    world.run()  # the user resumes the run
    assert world.run(restarted=True) == texts[:1]


def test_the_controller_is_restarted_at_a_rate(make_world, tmp_path):
    world = make_world({})
    world.run()
    for step in range(1, 6):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
        world.run(restarted=True)
    (tmp_path / "checkpoints/step-000006").mkdir()
    with expect_error(errors.RestartLimitError, "5", "(recovery.max_restarts"):
        world.run(restarted=True)
    log = tmp_path / "restarts.jsonl"
    log.write_text(re.sub(r'"time": [\d.]+', '"time": 1.0', log.read_text()))
    world.run(restarted=True)


def test_processes_that_die_during_startup_are_restarted(make_world):
    # the second time, a rank that lost contact with a peer reports first
    world = make_world({0: [lost_worker(), errors.WorkerError("connection closed by peer")]})
    world.dead = lost_worker()
    world.run()
    assert world.log == [(None, False), "ended", (None, True), "ended", (None, True)]


def test_an_assembly_error_is_raised_without_a_restart(make_world):
    error = errors.WorkerError("out of memory")
    make_world({0: [error]}).assert_fails(error)


def test_three_identical_failures_end_the_run(make_world):
    world = make_world({2: [lost_worker(f"rank 1 died (pid {n})") for n in range(3)]})
    with expect_error(errors.RestartLimitError, "3", "recovery.max_identical_failures", "1"):
        world.run()
    assert world.log.count("ended") == 2


@pytest.mark.parametrize(
    "error",
    [
        errors.LostEngineError("the nodes of all engines are lost"),
        errors.LostRankError("lost the connection to rank 1"),
        errors.HungWorkerError("train of step 2 took longer than 3600 s; no answer from trainer rank 1"),
    ],
)
def test_a_loss_that_no_death_explains_restarts_the_run(error, make_world):
    world = make_world({2: [error]})
    world.run()
    assert world.log == [(None, False), "ended", ("step-1", True)]


@pytest.mark.parametrize("error", [errors.HungWorkerError("start: no answer"), errors.LostRankError("NCCL error")])
def test_a_first_start_without_a_death_is_not_repeated(error, make_world):
    world = make_world({0: [error]})
    world.assert_fails(error)
    world.failures[0] = [error]
    world.dead = lost_worker()
    world.run()
    assert world.log[1:] == [(None, False), "ended", (None, True)]


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerError("trainer.train_step failed on trainer rank 1: TypeError"),
        errors.WorkerError("a request took longer than rollout.request_timeout_seconds"),
        errors.WeightSyncError("a box has another dtype"),
    ],
)
def test_an_error_restarts_the_run_only_if_a_trainer_process_has_died(error, make_world):
    world = make_world({2: [error]})
    world.assert_fails(error)
    world = make_world({2: [error]})
    world.dead = lost_worker()
    messages = world.run()
    assert world.log == [(None, False), "ended", ("step-1", True)]
    assert messages == ["the trainer was lost (rank 1 died); restarting it (restart 1 of 5)"]


@pytest.mark.parametrize("error", [errors.LimitError("passed"), errors.RestartLimitError("engine 0 was lost 3 times")])
def test_errors_that_restarts_cannot_fix_end_the_run(error, make_world):
    make_world({2: [error]}).assert_fails(error)


DISAGGREGATED = {"pools": {"engines": {"nodes": 2}}, "rollout": {"pool": "engines"}}


def fail_to_reserve(*_: Any) -> Any:
    raise errors.ConfigError("too few")


def aborts(lost, patch, placement, *, is_up=True, reserve=fail_to_reserve, wait_seconds=0.0) -> bool:
    """Whether a run with a trainer on node `a` and engines on `b` and `c` aborts after the nodes in `lost` are lost."""
    there = {"a", "b", "c"} - lost
    patch.setattr(recovery, "cluster_nodes", lambda: [SimpleNamespace(id=node, name=node) for node in sorted(there)])
    patch.setattr(recovery, "remove_placement_group", lambda _: None)
    patch.setattr(recovery, "reserve_pools", reserve)
    patch.setattr(recovery, "NODE_POLL_SECONDS", 0.0)
    found: Any = RunAssembly.__new__(RunAssembly)
    found._config = run_config({"type": "grpo"}, placement=placement, recovery={"node_wait_seconds": wait_seconds})
    found._notify = lambda text: None
    found._nodes = {node: f"node {node}" for node in "abc"}
    slots = {"main": "a", "engines": "bc"} if "pools" in placement else {"main": "abc"}
    found._pools = {
        name: SlotPool(None, tuple(Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)), "cpu")
        for name, nodes in slots.items()
    }
    engines = SimpleNamespace(
        engine_slots=[(0,), (1,)],
        has_live_node=lambda replica: "bc"[replica] in there,
        shutdown=lambda: None,
        actors=dict,
    )
    found._rollout = (engines, SimpleNamespace(actors=dict, shutdown=lambda: None)) if is_up else None
    try:
        found.replace_nodes()
    except errors.LostNodeError:
        return True
    return False


@pytest.mark.parametrize(
    ("lost", "is_waited_for"), [("", False), ("b", False), ("c", False), ("a", True), ("ab", True), ("bc", True)]
)
def test_a_lost_node_is_waited_for_if_it_had_model_slots_or_the_last_engine(lost, is_waited_for, monkeypatch):
    assert aborts(set(lost), monkeypatch, DISAGGREGATED) == is_waited_for


def test_nodes_of_engines_that_have_not_started_or_share_them_with_the_trainer_are_waited_for(monkeypatch):
    assert aborts({"b"}, monkeypatch, DISAGGREGATED, is_up=False)
    assert aborts({"b"}, monkeypatch, {"nodes": 3})


def test_a_replacement_node_lost_before_its_slots_are_reserved_is_waited_for(monkeypatch):
    """The node is lost after it was counted and before its placement group is granted."""
    failures = [errors.ConfigError("too few"), errors.WorkerError("not granted"), errors.ConfigError("too few")]
    devices: list[str] = []

    def reserve(placement, _):
        devices.append(placement.device)
        if failures:
            raise failures.pop(0)
        return {"main": SlotPool(None, (Slot(0, 1.0, 0.0, "b", None),), "cpu")}

    assert not aborts({"a"}, monkeypatch, {"nodes": 3}, reserve=reserve, wait_seconds=UNREACHED_SECONDS)
    assert devices == ["cpu"] * 4
