"""RL training on two Slurm nodes: cancellation, and an error on one node."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.end_to_end.launched import process_title
from tests.launch.conftest import PATIENT
from tests.launch.slurm.cluster import NODES
from tests.launch.slurm.conftest import Submit

CONFIG = "yaml/demo-2node.yaml"

OLD_RAY_ON_N2 = """\
#!/usr/bin/env bash
[[ $SLURMD_NODENAME == n2 ]] && export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}
exec {megarl} "$@"
"""


def local_overrides(folder: Path, **values: object) -> list[str]:
    """Return overrides that make the run write only to `folder`, with few prompts and much patience."""
    values = {"run_dir": folder / "run", "model.path": folder / "model", "algorithm.prompts_per_step": 4} | values
    values |= {f"placement.{name}": value for name, value in PATIENT.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_demo_config_trains_on_both_nodes_until_cancelled(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **{"trainer.steps": 1000}))
    job.wait_for_step(2)
    for kind in ("sglang::scheduler", "ray::WorkerHost"):
        workers = [process for process in job.find_live_processes() if process_title(process).startswith(kind)]
        assert sorted(map(job.node_of, workers)) == list(NODES), [process_title(p) for p in job.find_live_processes()]
    job.cancel()
    job.assert_nothing_is_left()
    job.wait()
    assert job.field("JobState") == "CANCELLED"


def test_job_fails_and_names_the_node_with_other_packages(submit: Submit, tmp_path: Path):
    old = tmp_path / "ray-0.1.dist-info/METADATA"
    old.parent.mkdir()
    old.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 0.1\n")
    megarl = tmp_path / "venv/bin/megarl"
    megarl.parent.mkdir(parents=True)
    megarl.write_text(OLD_RAY_ON_N2.format(folder=tmp_path, megarl=Path(sys.executable).with_name("megarl")))
    megarl.chmod(0o755)
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path), VENV=str(tmp_path / "venv"))
    assert job.wait() == 1
    assert "error: node n2 (127.0.0.1, rank 1) has ray 0.1, n1 (rank 0) has " in job.output
    assert "Ray head started" not in job.output
    assert job.find_live_processes() == []
