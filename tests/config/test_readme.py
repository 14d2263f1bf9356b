"""The README's examples load, and its tables are complete."""

import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.config import RunConfig, load_config
from megarl.config.algorithms.algorithm import AlgorithmConfig

README = Path(__file__).parents[2] / "README.md"


def test_the_example_configuration_loads(tmp_path):
    example, pools = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example)
    config = load_config(RunConfig, path)
    assert config.algorithm.group_size == 8
    assert config.dp == 2
    path.write_text(example.partition("placement:")[0] + pools)
    config = load_config(RunConfig, path)
    assert (config.placement.slots, config.rollout_pool.slots, config.disaggregated) == (16, 32, True)


def test_the_example_algorithm_section_loads(tmp_path):
    (example,) = re.findall(r"```\n(algorithm:.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text("run_dir: r\nmodel: {path: m}\ndata: {path: d}\n" + example)
    config = load_config(RunConfig, path)
    (critic,) = config.auxiliary_models
    assert (critic.pool, config.placement.total_slots) == ("critics", 12)


def test_the_algorithm_table_is_complete():
    (table,) = re.findall(r"\| type \| what it is .*?\n\n", README.read_text(), re.DOTALL)
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    with pytest.raises(ValidationError) as error:
        TypeAdapter(AlgorithmConfig).validate_python({"type": "none"})
    assert sorted(named) == sorted(re.findall(r"'(\w+)'", error.value.errors()[0]["ctx"]["expected_tags"]))


def test_the_command_table_is_complete():
    from megarl.cli.main import SUMMARIES

    named = set(re.findall(r"^\| `megarl (\w+)", README.read_text(), re.MULTILINE))
    assert named == set(SUMMARIES)
