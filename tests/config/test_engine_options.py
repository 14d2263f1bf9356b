"""The tables of SGLang's options against the options that the installed SGLang has."""

from __future__ import annotations

import ast
from fnmatch import filter as matching
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from megarl.config.engine_options import (
    ALLOWED_OPTIONS,
    ALLOWED_VALUES,
    OWN_KEYS,
    REFUSED_OPTIONS,
    SGLANG_VERSION,
    classify,
    find_option_problems,
    find_variable_problems,
)
from tests.config.runs import error_message, has_parts, make_run


def read_options() -> set[str]:
    """Return the fields of SGLang's ServerArgs, from its source: this process cannot import SGLang."""
    fields = Path(str(distribution("sglang").locate_file("sglang/srt/arg_groups/fields")))
    trees = [ast.parse(file.read_text()) for file in fields.glob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        entry.target.id
        for each in classes
        for entry in each.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }


def test_every_option_of_sglang_is_in_exactly_one_table() -> None:
    assert distribution("sglang").version == SGLANG_VERSION
    options = read_options()
    assert len(options) == 546
    assert {name: entries for name in options if len(entries := classify(name)) != 1} == {}


def test_tables_name_nothing_else() -> None:
    options = sorted(read_options())
    listed = [*ALLOWED_OPTIONS, *OWN_KEYS, *(name for refused in REFUSED_OPTIONS for name in refused.names)]
    assert [name for name in listed if not matching(options, name)] == []
    assert len(listed) == len(set(listed))
    assert ALLOWED_VALUES.keys() <= ALLOWED_OPTIONS


CANNOT_WORK = {
    "speculative_algorithm": "EAGLE", "pp_size": 2, "dp_size": 2, "enable_dp_attention": True, "quantization": "fp8",
    "nnodes": 2, "node_rank": 1, "enable_lora": True, "lora_paths": ["a"], "enable_eplb": True,
    "moe_a2a_backend": "deepep", "cpu_offload_gb": 8, "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file", "enable_memory_saver": True, "weight_cache_mode": "daemon",
    "load_format": "dummy", "moe_runner_backend": "flashinfer_trtllm", "tp_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT_WORK)
def test_options_that_cannot_work_are_refused_when_the_configuration_is_loaded(name: str) -> None:
    message = error_message(rollout={"engine": {"extra_args": {name: CANNOT_WORK[name]}}})
    (line,) = message.splitlines()
    assert line.startswith(f"rollout.engine.extra_args: {name}: ")
    assert len(line) < 250


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"pages_size": 2}, "pages_size: SGLang has no such argument; did you mean page_size?"),
        ({"xyzzy": 2}, "xyzzy: SGLang has no such argument"),
        ({"tp_size": 2}, "tp_size: megarl sets this argument itself, from rollout.tp"),
        ({"nnodes": 2}, "nnodes: megarl sets this argument itself, from rollout.tp"),
        ({"ep_size": 0}, "ep_size: needs a size of at least 1, got 0"),
        ({"load_format": "dummy"}, "load_format: needs to be one of auto, safetensors, got dummy: ... layout"),
    ],
)
def test_message(extra_args: dict[str, Any], message: str) -> None:
    (found,) = find_option_problems(extra_args)
    assert has_parts(found, message)


def test_all_problems_are_reported_in_one_line() -> None:
    message = error_message(rollout={"engine": {"extra_args": {"pp_size": 2, "node_rank": 1}}})
    assert has_parts(
        message, "rollout.engine.extra_args: pp_size: ... raise rollout.tp instead; node_rank: megarl sets"
    )


def test_expert_parallel_size_is_that_of_the_engine() -> None:
    slots = {"slots_per_node": 4}
    run = make_run(placement=slots, rollout={"tp": 4, "engine": {"extra_args": {"ep_size": 4}}})
    assert run.rollout.engine.ep_size == 4
    message = error_message(placement=slots, rollout={"tp": 4, "engine": {"extra_args": {"ep_size": 2}}})
    assert message == "rollout: engine.extra_args: ep_size needs to be 1 or rollout.tp = 4, got 2"


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("true", True), ("0", False), ("False", False)])
def test_environment_that_reorders_weights_is_refused(value: str, is_refused: bool) -> None:
    found = list(find_variable_problems({"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": value}))
    assert bool(found) == is_refused
