"""Invalid configurations end a command before it starts any process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megarl.placement.hardware import visible_gpu_names
from tests.end_to_end.conftest import Launch
from tests.end_to_end.tiny_world import write_run


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_unknown_key_is_refused_immediately(world: Path, tmp_path: Path, launch: Launch) -> None:
    path = write_run(world, tmp_path)
    before = children_cpu_seconds()
    command = launch("train", path, "--set", "trainer.optimiser.lr=1")
    assert command.wait() == 2
    assert children_cpu_seconds() - before < 3
    assert command.stderr.startswith("error: ")
    assert "trainer.optimiser" in command.stderr
    assert not (tmp_path / "run").exists()
    assert list(command.temporary.iterdir()) == []


@pytest.mark.skipif(bool(visible_gpu_names()), reason="this machine has a GPU")
def test_cuda_is_refused_without_gpus(world: Path, tmp_path: Path, launch: Launch) -> None:
    command = launch("train", write_run(world, tmp_path), "--set", "placement.device=cuda")
    assert command.wait() == 2
    assert command.stderr.startswith("error: ")
    assert "placement.device: cuda needs nodes * slots_per_node = 1 * 2 = 2 GPUs, this machine has 0" in command.stderr
    command.assert_no_processes_left()
