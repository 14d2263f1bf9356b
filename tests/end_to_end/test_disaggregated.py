"""Weight sync to disaggregated engines, which have their own slots."""

import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.config import RunConfig
from megarl.errors import MegarlError, WeightSyncError, WorkerError
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.transfer.weight_sums import PartSums
from megarl.run.sync.sync_connections import make_transfer_spec
from tests.end_to_end.components import Components, engine_host, started
from tests.end_to_end.launched import MISMATCH
from tests.end_to_end.test_components import differing
from tests.end_to_end.tiny_world import run_tree
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, wait_until

DISAGGREGATED = {"slots_per_node": 2, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}


def make_config(world: Path, folder: Path, **weight_sync: Any) -> RunConfig:
    """Return the configuration of two data-parallel trainer ranks, and an engine on a third slot."""
    sections: dict[str, Any] = {
        "weight_sync": {"bucket_bytes": 60_000, **weight_sync},
        "placement": DISAGGREGATED,
        "recovery": {"max_restarts": 0},
    }
    return RunConfig.model_validate(run_tree(world, folder, **sections))


def planned(components: Components) -> TransferSpec:
    """Return the transfer plan computed only from the parallel sizes of both sides."""
    engines = components.engines
    spec = make_transfer_spec(
        components.config, engines.engine_slots, engines.pool, components.pool, engines.weight_needs()
    )
    model, _ = load_architecture_and_dtype(components.config.model.path)
    return replace(spec, sources=trainer_layouts(model, components.trainer.grid, "float32"))


def test_received_engine_weights_equal_the_export_bitwise(ranks, world, tmp_path):
    with started(make_config(world, tmp_path / "run", verify={"every": 1}), ranks) as components:
        transfer_spec = planned(components)
        hops = [[hop for r in transfer_spec.plan(rank).rounds for hop in r.hops] for rank in range(3)]
        for version in (0, 1):
            exported = components.exported(tmp_path / f"exported-{version}")
            components.overwrite_served(exported)
            report = components.weights.push(version)
            assert differing(components.served(tmp_path / f"served-{version}"), exported) == []
            stats, need = report.stats, sum(t.nbytes for t in exported.values())
            assert stats.bytes_sent == stats.bytes_received == stats.bytes_delivered == report.bytes_moved == need
            assert stats.bytes_sent == sum(hop.bytes_sent for of_rank in hops for hop in of_rank)
            assert stats.messages == sum(len(hop.receives) for of_rank in hops for hop in of_rank)
            # both trainer ranks hold all weights and share the sending
            assert max(sum(hop.bytes_sent for hop in of_rank) for of_rank in hops) < 0.6 * need
            groups = components.sample(f"version-{version}")
            assert {t.tokens_by_version[-1][0] for g in groups for t in g.summary.trajectories} == {version}
            assert 0 < components.train(groups).metrics[MISMATCH] <= 1e-4
            assert report.seconds["verify"] > 0
        check_that_a_difference_is_found(components, 2)


def check_that_a_difference_is_found(components: Components, version: int) -> None:
    """Push while the trainer ranks report another sum for one of the pieces than that of their weights."""
    sum_weights = components.trainer.sum_weights

    def altered() -> list[PartSums]:
        by_rank = sum_weights()
        assert len(by_rank) == 2
        return [replace(sums, total=sums.total + (sums.piece == sums.piece[0])) for sums in by_rank]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components.trainer, "sum_weights", altered)
        with pytest.raises(WeightSyncError, match=rf"^version {version}: .*0: TP rank 0 does not hold the values of "):
            components.weights.push(version)
    assert components.weights.policy_version == version - 1
    with expect_error(WeightSyncError, "1", "version", "update"):
        components.engines.call("generate_many", [])
    components.weights.push(version)
    assert components.weights.policy_version == version


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def failing_push(components: Components, version: int, stopped: int, meanwhile: Callable[[], None]) -> MegarlError:
    """Return the error of a push during which process `stopped` hangs and `meanwhile` is called."""
    errors: list[MegarlError] = []
    sync = components.weights
    updates = sync.num_updates

    def push() -> None:
        with pytest.raises(MegarlError) as error:
            sync.push(version)
        errors.append(error.value)

    os.kill(stopped, signal.SIGSTOP)
    thread = threading.Thread(target=push)
    thread.start()
    try:
        assert wait_until(lambda: sync.num_updates > updates)
        meanwhile()
        thread.join(HANG_SECONDS)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert not thread.is_alive()
    return errors[0]


@pytest.mark.slow
def test_hung_and_dead_trainer_ranks_are_named(cluster, world, tmp_path):
    with started(make_config(world, tmp_path / "run", timeout_seconds=8)) as components:
        first, second = map(pid_of, components.processes.actors)
        components.weights.push(0)
        error = failing_push(components, 1, second, lambda: None)
        assert isinstance(error, WeightSyncError)
        # both other ranks time out, one waiting for this rank and one for the other
        assert re.search(r"round \d of the weights: .* within 8 s; no answer from trainer rank 1 ", str(error))
        assert "(ranks up to 1 are trainer ranks, those of engine i begin at 2 + 1 * i)" in str(error)
        with expect_error(WeightSyncError, "0", "version", "engine"):
            components.sample("mixed")
        exported = components.exported(tmp_path / "exported")
        components.weights.push(1)
        assert differing(components.served(tmp_path / "served"), exported) == []
        error = failing_push(components, 2, first, lambda: os.kill(second, signal.SIGKILL))
        assert isinstance(error, WorkerError)
        assert "trainer rank 1 died. " in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "host"])
def test_dead_engine_is_named(victim, cluster, world, tmp_path):
    with started(make_config(world, tmp_path / "run", timeout_seconds=8)) as components:
        components.weights.push(0)
        (health,) = components.engines.call("health")
        (scheduler,) = health.scheduler_pids
        doomed = scheduler if victim == "scheduler" else engine_host(scheduler)
        error = failing_push(
            components, 1, pid_of(components.processes.actors[1]), lambda: os.kill(doomed, signal.SIGKILL)
        )
        assert isinstance(error, WorkerError)
        message = "the engine's scheduler process of TP rank 0 was ended by SIGKILL"
        assert message in str(error) if victim == "scheduler" else "engine 0 died. " in str(error)
