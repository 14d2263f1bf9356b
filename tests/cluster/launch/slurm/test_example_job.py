"""The job script of examples/two-node-slurm, on a Slurm cluster of two nodes without GPUs."""

import pytest

from tests.cluster.launch.slurm.cluster import NODES, ROOT
from tests.cluster.launch.slurm.test_train import CONFIG, local_overrides
from tests.end_to_end.launched import list_steps

pytestmark = pytest.mark.slow


def test_the_job_trains_a_given_configuration_on_both_nodes(submit, tmp_path):
    job = submit(str(ROOT / "examples/two-node-slurm/job.sbatch"), CONFIG, *local_overrides(tmp_path))
    assert job.wait() == 0, job.output
    assert job.field("JobName") == "gsm8k-7b"
    assert all(node in job.output for node in NODES)
    steps = list_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["weight_sync/bytes"] > 0 for row in steps)
    job.assert_nothing_is_left()
