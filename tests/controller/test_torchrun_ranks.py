from __future__ import annotations

import pytest

from megarl.config.placement import PlacementConfig
from megarl.controller import torchrun_ranks
from megarl.errors import ConfigError
from megarl.process.torchrun_env import TorchrunWorld

WORLD = TorchrunWorld(rank=0, size=8, local_rank=0, local_size=4)


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [("auto", 0, "cpu"), ("auto", 3, "cpu"), ("auto", 4, "cuda"), ("cpu", 4, "cpu"), ("cuda", 5, "cuda")],
)
def test_ranks_use_gpus_if_there_is_one_for_each(device, gpus, chosen, monkeypatch):
    monkeypatch.setattr(torchrun_ranks, "visible_gpu_names", lambda: ["a GPU"] * gpus)
    assert torchrun_ranks.choose_device(PlacementConfig(device=device), WORLD) == chosen


def test_requested_gpus_must_exist(monkeypatch):
    monkeypatch.setattr(torchrun_ranks, "visible_gpu_names", lambda: ["a GPU"] * 3)
    with pytest.raises(ConfigError, match=r"^placement\.device: cuda needs a GPU for each of torchrun's 4 ranks .* 3$"):
        torchrun_ranks.choose_device(PlacementConfig(device="cuda"), WORLD)
