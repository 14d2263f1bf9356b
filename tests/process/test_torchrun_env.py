from __future__ import annotations

import pytest

from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError
from megarl.process import torchrun_env
from megarl.process.torchrun_env import TorchrunWorld, said_once, torchrun_world

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def world(rank=0, size=4, local_size=2):
    return TorchrunWorld(rank=rank, size=size, local_rank=rank % local_size, local_size=local_size)


def test_the_world_is_torchruns_alone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert torchrun_world() is None  # somebody else's variables, such as Slurm's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert torchrun_world() == TorchrunWorld(rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize(("size", "local_size", "slots"), [(4, 2, (2, 2)), (2, 2, (1, 2)), (3, 2, (1, 3))])
def test_every_rank_is_a_slot(size, local_size, slots):
    assert world(size=size, local_size=local_size).slots == slots


def test_a_placement_of_another_size_is_refused_with_the_arithmetic():
    world().require(PlacementConfig(nodes=2, slots_per_node=2))
    with pytest.raises(ConfigError, match=r"nodes \* slots_per_node = 2 \* 4 = 8, torchrun's world size = 4 \("):
        world().require(PlacementConfig(nodes=2, slots_per_node=4))


@pytest.mark.parametrize(("place", "waits"), [(None, 0), (world(rank=0), 0), (world(rank=1), 10)])
def test_other_ranks_leave_it_to_the_first_to_speak(place, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(torchrun_env.time, "sleep", waited.append)
    monkeypatch.setattr(torchrun_env.signal, "signal", lambda *_: None)
    with pytest.raises(ConfigError), said_once(place):
        raise ConfigError("a mistake")
    assert sum(waited) == waits
