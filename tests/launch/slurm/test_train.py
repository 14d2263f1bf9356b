"""Reinforcement learning on two nodes of Slurm, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.end_to_end.launched import name_of
from tests.launch.slurm.cluster import NODES
from tests.launch.slurm.conftest import Submit

RECIPE = "yaml/demo-2node.yaml"

END_SECONDS = 25.0
"""Less than Slurm's KillWait of 30."""

OLD_RAY_ON_N2 = """\
#!/usr/bin/env bash
[[ $SLURMD_NODENAME == n2 ]] && export PYTHONPATH={folder}
exec {megarl} "$@"
"""


def here(folder: Path, **values: object) -> list[str]:
    """Overrides of the recipe that have it write to `folder` alone."""
    values = {"run_dir": folder / "run", "model.path": folder / "model"} | values
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_a_recipe_trains_on_both_nodes_until_it_is_cancelled(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", RECIPE, *here(tmp_path, **{"trainer.steps": 1000}))
    job.wait_for_step(2, 180)
    for kind in ("sglang::scheduler", "ray::Shell"):
        workers = [process for process in job.living() if name_of(process).startswith(kind)]
        assert sorted(map(job.node_of, workers)) == list(NODES), [name_of(p) for p in job.living()]
    job.cancel()
    job.assert_nothing_is_left(END_SECONDS)
    job.wait(END_SECONDS)
    assert job.field("JobState") == "CANCELLED"


def test_a_node_with_other_packages_fails_the_job_which_names_it(submit: Submit, tmp_path: Path):
    old = tmp_path / "ray-0.1.dist-info/METADATA"
    old.parent.mkdir()
    old.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 0.1\n")
    megarl = tmp_path / "venv/bin/megarl"
    megarl.parent.mkdir(parents=True)
    megarl.write_text(OLD_RAY_ON_N2.format(folder=tmp_path, megarl=Path(sys.executable).with_name("megarl")))
    megarl.chmod(0o755)
    job = submit("train.sbatch", RECIPE, *here(tmp_path), VENV=str(tmp_path / "venv"))
    assert job.wait(60) == 1
    assert "error: node n2 (127.0.0.1, rank 1) has ray 0.1, n1 (rank 0) has " in job.output
    assert "Ray up" not in job.output
    assert job.living() == []
