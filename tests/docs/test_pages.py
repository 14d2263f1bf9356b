"""The table of commands is complete, and the placements of docs/cluster.md match its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reshard.published import DEEPSEEK_V3
from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.megatron.families.layout_checks import parallel_problems
from megarl.megatron.families.load_architecture import load_architecture
from tests.docs.code_blocks import split_page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_command_table_is_complete() -> None:
    from megarl.cli.main import SUMMARIES

    table = (DOCS / "commands.md").read_text().partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `megarl (\w+)", table, re.MULTILINE)) == sorted(SUMMARIES)


def placements() -> list[RunConfig]:
    blocks = [block.text for block in split_page((DOCS / "cluster.md").read_text())[0] if block.language == "yaml"]
    required: dict[str, Any] = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    return [make_config(RunConfig, required | yaml.safe_load(text)) for text in blocks]


def test_the_placements_of_the_cluster_page_load() -> None:
    engines, critic, spanning = placements()
    assert (engines.placement.slots, engines.rollout_pool.slots, engines.disaggregated) == (16, 32, True)
    (model,) = critic.auxiliary_models
    assert (model.name, model.pool, critic.placement.total_slots) == ("critic", "critics", 12)
    assert (spanning.nodes_per_engine, spanning.rollout_pool.slots) == (2, spanning.rollout.replicas * 16)
    deepseek = load_architecture(DEEPSEEK_V3, origin="test")
    assert list(parallel_problems(deepseek, spanning.trainer.parallel, spanning.placement.slots)) == []
