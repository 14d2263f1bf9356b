"""Invalid configurations end a command before it starts any process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.placement.hardware import visible_gpu_names
from tests.end_to_end.conftest import Launch
from tests.end_to_end.tiny_world import write_run

LOOK = """
import sys
from megarl.cli.main import main
code = main(sys.argv[1:])
assert not {"ray", "torch", "transformers"} & sys.modules.keys(), "imports that take seconds"
sys.exit(code)
"""


def test_unknown_key_is_refused_immediately(world: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOK, "train", write_run(world, tmp_path), "--set", "trainer.optimiser.lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "trainer.optimiser" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(bool(visible_gpu_names()), reason="this machine has a GPU")
def test_cuda_is_refused_without_gpus(world: Path, tmp_path: Path, launch: Launch) -> None:
    command = launch("train", write_run(world, tmp_path), "--set", "placement.device=cuda")
    assert command.wait() == 2
    assert command.stderr.startswith("error: ")
    assert "placement.device: cuda needs nodes * slots_per_node = 1 * 2 = 2 GPUs, this machine has 0" in command.stderr
    command.assert_no_processes_left()
    assert list(command.temporary.iterdir()) == []
