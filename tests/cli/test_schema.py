"""`megarl schema`: every key described, files and links up to date, all recipes valid."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from megarl.cli.schema import make_reference, make_schema
from megarl.config import STAGES
from megarl.config.load import read_tree

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


def keys_below(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from keys_below(value, f"{prefix}{name}.")


def entries(page: str) -> dict[str, str]:
    """Return anchor -> first line of each entry."""
    found = re.findall(r"^(`\w+`\{ #(\S+) \}.*)$", page, re.MULTILINE)
    assert len(found) == len({anchor for _, anchor in found})
    return {anchor: line for line, anchor in found}


def equivalents(page: str) -> dict[str, str]:
    """Return the path of a section -> the path under which its keys are listed."""
    found = {}
    for section in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        heading = re.match(r"#+ .*\{ #(\S+) \}", section)
        same = re.search(r"^The same keys: (.*)\.$", section, re.MULTILINE)
        if heading and same:
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", same[1]), heading[1])
    return found


@pytest.mark.parametrize("command", STAGES)
def test_every_key_of_a_resolved_configuration_has_an_entry_and_every_link_a_target(command):
    page = make_reference(command)
    targets, links = re.findall(r"\{ #(\S+) \}", page), set(re.findall(r"\]\(#([^)]+)\)", page))
    assert len(targets) == len(set(targets))
    assert len(links) > 5
    assert links <= set(targets)
    listed, same = entries(page), equivalents(page)
    sections = set(re.findall(r"^#+ .*\{ #(\S+) \}$", page, re.MULTILINE)) | same.keys()
    paths = dict(keys_below(STAGES[command].model_validate(MINIMAL).model_dump()))
    assert len(paths) > 60
    for path, value in paths.items():
        parent, _, name = path.rpartition(".")
        places = (
            path,
            f"{same.get(parent, parent)}.{name}",
            path.replace("algorithm.", "algorithm.grpo."),
            path.replace("terms.accuracy", "terms.NAME.numeric"),
            path.replace("terms.accuracy", "terms.NAME"),
        )
        found = [listed[place] for place in places if place in listed]
        assert found or path in sections or path == "reward.terms.accuracy", path
        if isinstance(value, bool) and parent != "reward.terms.accuracy":
            assert f"default `{str(value).lower()}`" in found[0], path


def test_entries_state_type_bounds_and_default():
    page = make_reference("train")
    listed = entries(page)
    for key, end in {
        "run_dir": "string, required",
        "trainer.steps": "integer ≥ 1, default `100`",
        "trainer.optimizer.beta1": "number ≥ 0 and < 1, default `0.9`",
        "checkpoint.verify": "one of `checksums`, `sizes`, default `checksums`",
        "limits.kl": "[section](#limits.logprob_kl) or number or null, default `null`",
        "algorithm.ppo.gamma": "number > 0 and ≤ 1, default `1.0`",
        "reward.terms.NAME.format.type": "`format`, required",
    }.items():
        assert listed[key].endswith(end)
    entry = page[page.index("{ #algorithm.group_size }") :].partition("\n\n`")[0]
    assert "Other defaults: `1` for `distillation`." in entry


def test_the_command_prints_it(output):
    assert output("schema", "sft", "--markdown") == make_reference("sft") + "\n"
