"""Examples that run for minutes on two cores, with the results that their READMEs name."""

import os
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launched import gained, list_steps, run_program
from tests.gsm8k import PUBLISHED, needs_published

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = Path(sys.executable).parent


def run(folder: Path, *command: str | Path) -> str:
    """Run a command in `folder`, with the programs of this environment; return its output."""
    path = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])
    source = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = run_program(*command, cwd=folder, env=environment, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_published
def test_gsm8k_on_a_laptop_learns_the_format(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/gsm8k").symlink_to(PUBLISHED.resolve())
    run(tmp_path, "megarl", "sft", EXAMPLES / "gsm8k-grpo/laptop-sft.yaml")
    run(tmp_path, "megarl", "train", EXAMPLES / "gsm8k-grpo/laptop.yaml")
    steps = list_steps(tmp_path / "runs/gsm8k-laptop/grpo")
    assert gained([row["reward/format"] for row in steps]) > 0.1
    assert gained([row["response/length"] for row in steps]) < 0


def test_ppo_raises_the_score_of_the_reward_model(tmp_path):
    output = run(tmp_path, "bash", EXAMPLES / "reward-model-ppo/run.sh")
    (ranked,) = (line.split() for line in output.splitlines() if line.startswith("held-out accuracy"))
    assert float(ranked[4]) > 0.85
    steps = list_steps(tmp_path / "runs/reward-model-ppo/ppo")
    assert gained([row["reward/mean"] for row in steps]) > 1
    assert gained([row["reward/accuracy"] for row in steps]) > 0
    curve = tmp_path / "reward.svg"
    script = EXAMPLES / "plot_curve.py"
    run(tmp_path, sys.executable, script, "runs/reward-model-ppo/ppo", "--metric", "reward/mean", "--out", curve)
    assert curve.stat().st_size > 1000
