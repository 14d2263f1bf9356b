"""docs/coming-from.md against the schemas: every megarl key of the tables exists, and every value is allowed there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.tables import code, tables
from tests.docs.yaml_blocks import find_nodes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text()
SCHEMA: dict[str, Any] = json.loads((ROOT / "yaml/schema/train.json").read_text())
PROJECTS = ("verl", "slime", "NeMo-RL")
MAPPINGS = [table for table in tables(PAGE) if table[0][1:2] == ["megarl"]]
KEYS = sorted({span for table in MAPPINGS for row in table[1:] for span in code(row[1]) if not span.startswith("--")})


def find_problem(span: str) -> str | None:
    """Return what is wrong with `key.path` or `key.path: value`."""
    path, colon, value = span.partition(": ")
    nodes = list(find_nodes(SCHEMA, SCHEMA, path.split("."), map_key="NAME"))
    if not nodes:
        return f"megarl has no key {path}"
    allowed = {
        each for node in nodes for each in (*node.get("enum", ()), *([node["const"]] if "const" in node else []))
    }
    return f"{path} cannot be {value}, only {sorted(allowed)}" if colon and value not in allowed else None


@pytest.mark.parametrize("span", KEYS)
def test_keys_of_the_tables_exist(span: str) -> None:
    assert find_problem(span) is None


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ("trainer.optimizer.lrr", "megarl has no key trainer.optimizer.lrr"),
        ("algorithm.type: grpoo", "algorithm.type cannot be grpoo"),
        ("reward.terms.NAME.weigth", "megarl has no key"),
        ("algorithm.critic.clip", None),
        ("reward.terms.NAME.per: group", None),
    ],
)
def test_wrong_keys_are_found(span: str, message: str | None) -> None:
    found = find_problem(span)
    assert found is None if message is None else message in str(found)


def test_each_project_has_all_topics() -> None:
    counts = {name: sum(len(table) - 1 for table in MAPPINGS if table[0][0] == name) for name in PROJECTS}
    assert set(counts) == {table[0][0] for table in MAPPINGS}
    assert all(count > 50 for count in counts.values()), counts
    assert all(sum(table[0][0] == name for table in MAPPINGS) == 5 for name in PROJECTS)
    assert len(KEYS) > 80
