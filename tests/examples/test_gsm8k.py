"""The examples on GSM8K for GPUs: `megarl check` accepts them, with the shapes of their models and no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import main
from tests.examples.published_shapes import write_published_shape
from tests.gsm8k import OWN_ROWS, PUBLISHED, needs_published

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(params=["own rows", pytest.param("published", marks=needs_published)])
def gsm8k(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder with train.jsonl and test.jsonl."""
    if request.param == "published":
        return PUBLISHED
    rows = (OWN_ROWS / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows * 20)  # more than the prompts of a step
    (tmp_path / "test.jsonl").write_text(rows)
    return tmp_path


def data_overrides(folder: Path) -> list[str]:
    return [f"data.path={folder}/train.jsonl", f"data.eval_path={folder}/test.jsonl"]


@pytest.mark.parametrize(
    ("config", "hub_id", "num_nodes", "overrides"),
    [
        ("gsm8k-grpo/gpu.yaml", "Qwen/Qwen2.5-0.5B-Instruct", 1, []),
        ("gsm8k-grpo/gpu.yaml", "Qwen/Qwen2.5-0.5B-Instruct", 1, ["placement.slots_per_node=1", "rollout.replicas=1"]),
        ("two-node-slurm/train.yaml", "Qwen/Qwen2.5-7B-Instruct", 2, []),
        (
            "two-node-slurm/train.yaml",
            "Qwen/Qwen2.5-7B-Instruct",
            2,
            [
                "placement.nodes=1",
                "placement.pools={engines: {nodes: 1, slots_per_node: 8}}",
                "placement.rollout.pool=engines",
                "rollout.replicas=4",
            ],
        ),
    ],
    ids=["one node", "one GPU", "two nodes", "disaggregated"],
)
def test_the_configurations_for_gpus_pass_megarl_check(
    config: str,
    hub_id: str,
    num_nodes: int,
    overrides: list[str],
    gsm8k: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = EXAMPLES / config
    assert f"path: {hub_id}" in path.read_text()
    model = write_published_shape(tmp_path / "model", hub_id)
    settings = [f"model.path={model}", *data_overrides(gsm8k), *overrides]
    nodes = ["--nodes", str(num_nodes), "--gpus-per-node", "8"]
    code = main(["check", str(path), *nodes, "--set", *settings])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "# ok: no problems found for megarl train"
