"""`megarl schema`: every key described, the files in yaml/schema up to date, all recipes valid."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from megarl.config import STAGES
from megarl.config.load import read_tree
from megarl.offline.config_schema import make_schema

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*ROOT.glob("yaml/**/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}


@functools.cache
def schema_of(command: str) -> Draft202012Validator:
    return Draft202012Validator(make_schema(command))


def described_properties(node: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the path of each property in the schema, and whether it has a description."""
    if isinstance(node, dict):
        for name, value in node.get("properties", {}).items():
            yield f"{path}.{name}", bool(value.get("description"))
        for name, value in node.items():
            yield from described_properties(value, f"{path}/{name}")
    elif isinstance(node, list):
        for value in node:
            yield from described_properties(value, path)


@pytest.mark.parametrize("command", STAGES)
def test_schemas_are_valid_and_every_key_has_a_description(command, output):
    schema = make_schema(command)
    Draft202012Validator.check_schema(schema)
    found = list(described_properties(schema))
    assert len(found) > 50
    assert [path for path, is_described in found if not is_described] == []
    written = (ROOT / f"yaml/schema/{command}.json").read_text()
    assert written == output("schema", command), f"out of date; `megarl schema {command}` writes it"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipes_name_their_schema_and_satisfy_it(path):
    first = path.read_text().splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert named is not None, first
    schema = json.loads((path.parent / named[1]).read_text())
    assert [error.message for error in Draft202012Validator(schema).iter_errors(read_tree(path))] == []


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": {"group_size": 4}},
        {"algorithm": {"type": "ppo", "critic": {"clip": 0.2}}},
        {"algorithm": {"type": "gspo", "dual_clip": 3.0}},
        {"algorithm": {"group_size": 4, "critic": {}}},
        {"algorithm": {"type": "unknown"}},
        {"limits": {"logprob_abs_max": 0.5, "grad_norm": {"max": 100, "action": "skip"}}},
        {"limits": {"logprob_abs_max": "low"}},
        {"trainer": {"batch_size": 4}},
        {"trainer": {"steps": 0}},
        {"reward": {"terms": {"a": {"strict": True}, "b": {"type": "python", "path": "m:f", "on_error": "drop"}}}},
        {"reward": {"terms": {"b": {"type": "python"}}}},
        {"rollout": {"agent": {"path": "a:b", "kwargs": {"turns": 2}}}},
        {"placement": {"pools": {"b": {"slots_per_node": 2}}, "rollout": {"pool": "b"}}},
        {"unknown": 1},
    ],
    ids=repr,
)
def test_the_schema_accepts_what_the_configuration_accepts(sections):
    tree, is_valid = MINIMAL | sections, True
    try:
        STAGES["train"].model_validate(tree)
    except ValidationError:
        is_valid = False
    assert schema_of("train").is_valid(tree) == is_valid


def test_algorithms_outside_the_package_may_have_any_field():
    tree = MINIMAL | {"algorithm": {"type": "my_module:MyAlgorithm", "my_field": 1}}
    assert schema_of("train").is_valid(tree)
