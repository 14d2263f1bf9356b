"""Job scripts that start ranks with torchrun, on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.tiny_world import write_sft
from tests.launch.slurm.conftest import Submit


def test_sft_on_two_nodes(submit: Submit, world: Path, tmp_path: Path):
    job = submit("sft.sbatch", write_sft(world, tmp_path), "--set", "trainer.steps=2", PROCS_PER_NODE="1")
    assert job.wait() == 0, job.output
    assert job.last_step() == 2
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert "nodes: 2" in (tmp_path / "run/sft.yaml").read_text()
    job.assert_nothing_is_left()


@pytest.mark.slow
def test_reshard_benchmark_on_two_nodes(submit: Submit):
    layout = ("--train", "tp=2", "--gen", "tp=1")
    job = submit("bench_reshard.sbatch", "--model", "synthetic:4", *layout, "--strategies", "exact", PROCS_PER_NODE="1")
    assert job.wait() == 0, job.output
    # on a busy machine, torch adds warnings
    heading, row = (line for line in job.output.splitlines() if line.startswith(("strategy ", "exact ")))
    assert heading.split()[0] == "strategy"
    assert row.split()[0] == "exact"
    assert row.split()[-1] == "0"  # mismatched bytes
