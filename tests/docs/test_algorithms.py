"""docs/algorithms.md against the code: every algorithm, its defaults and presets, and the interface of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.algorithms import RLRun
from megarl.algorithms.registry import BUILT_IN
from megarl.config import RunConfig, load_config
from megarl.config.algorithms.policy import KlConfig, PolicyConfig
from megarl.config.algorithms.presets import PRESETS
from megarl.config.placement import AUXILIARY_ROLES
from tests.docs.tables import code, section, tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/algorithms.md").read_text()
DEMO = ROOT / "yaml/demo.yaml"
KINDS = [str(algorithm.Config.model_fields["type"].default) for algorithm in BUILT_IN]
COMMANDS = re.findall(r"^megarl check yaml/demo\.yaml --set (.+)$", section(PAGE, "Run each of them on the demo"), re.M)


def only_table(title: str) -> list[list[str]]:
    first, *_ = tables(section(PAGE, title))
    return first[1:]


def configured(command: str) -> PolicyConfig:
    config: PolicyConfig = load_config(RunConfig, DEMO, re.findall(r"'([^']+)'", command)).algorithm
    return config


def test_every_algorithm_has_a_row_and_a_command() -> None:
    assert sorted(row[0].strip("`") for row in only_table("Built-in algorithms")) == sorted(KINDS)
    assert [configured(command).type for command in COMMANDS] == [
        row[0].strip("`") for row in only_table("Built-in algorithms")
    ]


def shown(value: object) -> str:
    if isinstance(value, KlConfig):
        return f"{value.kind}, {value.coefficient:g}"
    return "null" if value is None else str(value) if not isinstance(value, float) else repr(value)


@pytest.mark.parametrize("row", only_table("Defaults and presets"), ids=lambda row: row[0].strip("`"))
def test_defaults_and_presets(row: list[str]) -> None:
    kind, aggregation, low, high, kl_loss, kl_reward, presets = row
    command = next(each for each in COMMANDS if f"type: {kind.strip('`')}," in each)
    fields = type(configured(command)).model_fields
    assert aggregation.strip("`") == fields["aggregation"].default
    for name, cell in {"clip_ratio_low": low, "clip_ratio_high": high}.items():
        assert (None if cell == "-" else float(cell)) == (fields[name].default if name in fields else None), name
    assert (kl_loss, kl_reward) == (shown(fields["kl_loss"].default), shown(fields["kl_reward"].default))
    assert code(presets) == [name for of, name in PRESETS if of == kind.strip("`")]


def test_every_field_is_named() -> None:
    fields = {name for algorithm in BUILT_IN for name in algorithm.Config.model_fields}
    named = {word for span in code(section(PAGE, "Fields of every algorithm")) for word in re.findall(r"\w+", span)}
    assert fields - {"type", "preset"} <= named


def test_calls_of_a_run_exist() -> None:
    calls = [call for row in only_table("What a run offers") for call in code(row[0])]
    names = [re.match(r"run\.(\w+)", call) for call in calls]
    assert all(name is not None and hasattr(RLRun, name[1]) for name in names), calls


def test_roles_of_placement_are_listed() -> None:
    keys = {row[3].strip("`").removeprefix("placement.") for row in only_table("Auxiliary models")}
    assert keys == set(AUXILIARY_ROLES)


def test_the_page_counts_the_lines_of_the_example() -> None:
    lines = len((ROOT / "examples/custom-algorithm/my_algorithm.py").read_text().splitlines())
    assert f"a loop in {lines} lines" in PAGE
