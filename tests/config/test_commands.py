"""The command of a resolved configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import STAGES, command_of, dump_config, load_resolved
from megarl.config.load import make_config


@pytest.mark.parametrize("command", STAGES)
def test_a_dumped_configuration_loads_with_its_type(command: str, tmp_path: Path) -> None:
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}, "checkpoint": {"every": 7}}
    config = make_config(STAGES[command], tree)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    found = load_resolved(tmp_path / "config.yaml")
    assert found == config
    assert type(found) is STAGES[command]
    assert command_of(found) == command
    assert found.checkpoint.every == 7
