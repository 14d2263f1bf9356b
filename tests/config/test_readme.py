"""The README's configuration is one that loads."""

import re
from pathlib import Path

from megarl.config import RunConfig, load_config

README = Path(__file__).parents[2] / "README.md"


def test_the_example_loads(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example)
    config = load_config(RunConfig, path)
    assert config.algorithm.group_size == 8
    assert config.dp == 2


def test_the_commands_are_those_that_exist():
    from megarl.cli.main import SUMMARIES

    named = set(re.findall(r"^\| `megarl (\w+)", README.read_text(), re.MULTILINE))
    assert named == set(SUMMARIES)
