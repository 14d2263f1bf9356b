"""`megarl schema --markdown`: every key of a configuration has an entry with its default, and every link a target."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.config import STAGES
from megarl.offline.config_reference import make_reference

MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}


def keys_below(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every key."""
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
