"""The torchrun world of a process."""

import pytest

from megarl.cluster.process import launcher_env
from megarl.cluster.process.launcher_env import TorchrunWorld, report_on_rank0, torchrun_world
from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError
from tests.errors import expect_error

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def world(rank=0, size=4, local_size=2):
    return TorchrunWorld(rank=rank, size=size, local_rank=rank % local_size, local_size=local_size)


def test_world_is_read_only_under_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert torchrun_world() is None  # variables of another launcher, such as Slurm
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert torchrun_world() == TorchrunWorld(rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize(("size", "local_size", "slots"), [(4, 2, (2, 2)), (2, 2, (1, 2)), (3, 2, (1, 3))])
def test_every_rank_is_one_slot(size, local_size, slots):
    assert world(size=size, local_size=local_size).slots == slots


def test_placement_of_another_size_is_rejected_with_the_arithmetic():
    world().check_placement(PlacementConfig(nodes=2, slots_per_node=2))
    with expect_error(ConfigError, "slots_per_node = 2", "4 = 8", "torchrun's", "= 4"):
        world().check_placement(PlacementConfig(nodes=2, slots_per_node=4))


@pytest.mark.parametrize(("process_world", "wait_seconds"), [(None, 0), (world(rank=0), 0), (world(rank=1), 10)])
def test_other_ranks_leave_the_report_to_rank_0(process_world, wait_seconds, monkeypatch):
    waited = []
    monkeypatch.setattr(launcher_env.time, "sleep", waited.append)
    monkeypatch.setattr(launcher_env.signal, "signal", lambda *_: None)
    with pytest.raises(ConfigError), report_on_rank0(process_world):
        raise ConfigError("a mistake")
    assert sum(waited) == wait_seconds
