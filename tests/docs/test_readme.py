"""The README's configuration, reward and algorithm work as printed, and it stays short."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.algorithms.registry import find_algorithm
from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.preflight.run_checks import check_run
from megarl.reward.python_function import load_reward
from tests.algorithms.scripted_run import run_script
from tests.docs.code_blocks import split_page

README = Path(__file__).parents[2] / "README.md"
MODULES = {"my_rewards": 8, "sign_grpo": 15}
"""Module that a Python block begins with as a comment -> most lines of code that it may have."""


def blocks(language: str) -> list[str]:
    return [block.text for block in split_page(README.read_text())[0] if block.language == language]


def python_block(module: str) -> str:
    (text,) = (text for text in blocks("python") if text.startswith(f"# {module}.py\n"))
    return text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    write_tiny_model(folder, ["1 + 2 = 3"], seed=0, head_dim=16, ffn_size=96, context_length=1024, **sizes)
    return folder


@pytest.fixture
def tree(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The README's configuration with a local model, in a folder with the data and modules that it describes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(python_block(module))
    (content,) = (yaml.safe_load(text) for text in blocks("yaml") if text.startswith("# my.yaml\n"))
    (tmp_path / content["data"]["path"]).write_text(json.dumps({"prompt": "8 * 9", "answer": "72"}) + "\n")
    yield content | {"model": {"path": str(model)}}
    for module in MODULES:
        sys.modules.pop(module, None)


def reward_section() -> dict[str, Any]:
    (section,) = (yaml.safe_load(text) for text in blocks("yaml") if text.startswith("reward:"))
    return dict(section)


def test_the_readme_is_short_and_its_modules_are_those_tested() -> None:
    assert len(README.read_text().splitlines()) <= 140
    assert sorted(text.split()[1].removesuffix(".py") for text in blocks("python")) == sorted(MODULES)
    for module, limit in MODULES.items():
        assert len([line for line in python_block(module).splitlines() if line]) <= limit


def test_the_configuration_passes_the_checks(tree: dict[str, Any]) -> None:
    (text,) = (text for text in blocks("yaml") if text.startswith("# my.yaml\n"))
    assert len(text.splitlines()) <= 10
    assert check_run(make_config(RunConfig, tree)) == []


def test_the_reward_scores(tree: dict[str, Any]) -> None:
    config = make_config(RunConfig, tree | reward_section())
    assert check_run(config) == []
    reward = load_reward(config.reward.terms["mine"], key="reward.terms.mine")  # type: ignore[arg-type]
    row = {"answer": "72"}
    assert reward.function(None, "8 * 9 is 72.", row) == {"reward": 1.2, "correct": True}
    assert reward.function(None, "word " * 60 + "72", row) == {"reward": 1.0, "correct": True}
    assert reward.function(None, "", row) == {"reward": 0.2, "correct": False}


def test_the_algorithm_trains(tree: dict[str, Any], tmp_path: Path) -> None:
    kind = "sign_grpo:SignGrpo"
    assert f'`algorithm: {{type: "{kind}"}}`' in README.read_text()
    config = make_config(RunConfig, tree | {"algorithm": {"type": kind}})
    assert check_run(config) == []
    import sign_grpo  # type: ignore[import-not-found]

    assert find_algorithm(config.algorithm.type) is sign_grpo.SignGrpo
    rewards = [[0.0, 1.0, 5.0], [2.0, 2.0, 2.0]]
    run = run_script(tmp_path / "run", {"type": kind}, lambda label, number, sample: rewards[number][sample], steps=2)
    assert run.call_order == ["engines sample", "policy train", "weights push"] * 2
    (batch,) = run.arguments("policy", "train")[0].mini_batches
    assert [sample.scalars["advantages"] for sample in batch.samples] == [-1.0, -1.0, 1.0, 0.0, 0.0, 0.0]
