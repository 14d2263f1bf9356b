"""The tables of SGLang's options and megatron-core's fields against the installed packages, and their checks."""

from __future__ import annotations

import ast
import re
from fnmatch import filter as matching
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from megarl.config import engine_options, megatron
from megarl.config.engine_options import ALLOWED_OPTIONS, ALLOWED_VALUES, NUMERIC_OPTIONS, OWN_KEYS, REFUSED_OPTIONS
from megarl.config.megatron import ALLOWED, CLASS_OF, NEEDS_TE, NEEDS_TE_LAYERS, REFUSED, find_field_problems
from tests.config.runs import error_message, has_parts, make_run

SOURCES = {
    "model": {
        "model_parallel_config.py": {"ModelParallelConfig"},
        "transformer/transformer_config.py": {"TransformerConfig", "MLATransformerConfig"},
    },
    "ddp": {"distributed/distributed_data_parallel_config.py": {"DistributedDataParallelConfig"}},
    "optimizer": {"optimizer/optimizer_config.py": {"OptimizerConfig"}},
}
COUNTS = {"sglang": 546, "model": 322, "ddp": 38, "optimizer": 63}

ANNOTATIONS = {
    "bool": {"bool", "Optional[bool]"},
    "int": {"int"},
    "int | null": {"Optional[int]", "Optional[Literal[2, 3, 4]]"},
    "float": {"float"},
    "float | null": {"Optional[float]"},
    "auto | flash | fused": {"AttnBackend"},
    "p2p | a2a | list": {"Optional[Union[str, List[str]]]"},
    "list": {"Optional[list[str]]"},
    "float32 | bfloat16": {"torch.dtype"},
}
"""Type of an allowed field -> annotations that it stands for; other types are some of the values of a Literal."""


def read_fields(part: str) -> dict[str, str]:
    """Return the annotation of each field, from the source: this process cannot import SGLang, and not import torch."""
    files: dict[Path, set[str] | None]
    if part == "sglang":
        folder = Path(str(distribution("sglang").locate_file("sglang/srt/arg_groups/fields")))
        files = dict.fromkeys(folder.glob("*.py"))
    else:
        root = Path(str(distribution("megatron-core").locate_file("megatron/core")))
        files = {root / file: classes for file, classes in SOURCES[part].items()}
    return {
        entry.target.id: ast.unparse(entry.annotation)
        for file, classes in files.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }


def test_the_tables_are_those_of_the_installed_versions() -> None:
    assert distribution("sglang").version == engine_options.SGLANG_VERSION
    assert distribution("megatron-core").version == megatron.MEGATRON_VERSION


@pytest.mark.parametrize("part", COUNTS)
def test_every_field_is_in_exactly_one_table_and_tables_name_nothing_else(part: Any) -> None:
    fields = read_fields(part)
    assert len(fields) == COUNTS[part]
    classify = engine_options.classify if part == "sglang" else partial(megatron.classify, part)
    assert {name: entries for name in fields if len(entries := classify(name)) != 1} == {}
    accepted = [*ALLOWED_OPTIONS, *OWN_KEYS] if part == "sglang" else ALLOWED[part]
    refusals = REFUSED_OPTIONS if part == "sglang" else REFUSED[part]
    listed = [*accepted, *(name for refused in refusals for name in refused.names)]
    assert [name for name in listed if not matching(sorted(fields), name)] == []
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("part", CLASS_OF)
def test_types_are_those_of_megatron(part: Any) -> None:
    fields = read_fields(part)
    for name, kind in ALLOWED[part].items():
        if kind in ANNOTATIONS:
            assert fields[name] in ANNOTATIONS[kind], name
        else:
            assert "Literal" in fields[name], name
            assert all(f"'{value}'" in fields[name] for value in kind.split(" | ") if value != "null"), name


def test_options_of_numbers_are_those_of_sglang() -> None:
    fields = read_fields("sglang")
    numeric = re.compile(r"A\[(Optional\[)?(List\[)?(int|float)\b")
    assert {name for name in ALLOWED_OPTIONS if numeric.match(fields[name])} == NUMERIC_OPTIONS


def test_options_with_conditions_are_allowed() -> None:
    assert {*NEEDS_TE, *NEEDS_TE_LAYERS} <= ALLOWED["model"].keys()
    assert ALLOWED_VALUES.keys() <= ALLOWED_OPTIONS


CANNOT_WORK = {
    "speculative_algorithm": "EAGLE", "pp_size": 2, "moe_dp_size": 2, "attn_cp_size": 2, "quantization": "fp8",
    "nnodes": 2, "node_rank": 1, "enable_lora": True, "lora_paths": ["a"], "enable_eplb": True,
    "moe_a2a_backend": "mooncake", "cpu_offload_gb": 8, "enable_hierarchical_cache": True,
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
    ("part", "name", "value", "message"),
    [
        ("sglang", "pages_size", 2, "SGLang has no such argument; did you mean page_size?"),
        ("sglang", "xyzzy", 2, "SGLang has no such argument"),
        ("sglang", "tp_size", 2, "megarl sets this argument itself, from rollout.tp"),
        ("sglang", "nnodes", 2, "megarl sets this argument itself, from rollout.tp"),
        ("sglang", "ep_size", 0, "needs a size of at least 1, got 0"),
        ("sglang", "ep_size", True, "needs a number, got True"),
        ("sglang", "attn_dp_size", 0, "needs a size of at least 1, got 0"),
        ("sglang", "dp_size", 1.5, "needs a size of at least 1, got 1.5"),
        ("sglang", "moe_a2a_backend", "mori", "needs to be one of none, deepep, got mori: ... loader"),
        ("sglang", "chunked_prefill_size", "010", "needs a number, got '010'"),
        ("sglang", "cuda_graph_bs_decode", [1, True], "needs a number, got [1, True]"),
        ("optimizer", "decoupled_lr", float("nan"), "needs float, null, got nan"),
        ("optimizer", "decoupled_lr", True, "needs float, null, got True"),
        ("sglang", "load_format", "dummy", "needs to be one of auto, safetensors, got dummy: ... layout"),
        (
            "model",
            "apply_rope_fuzion",
            True,
            "... TransformerConfig has no such field; did you mean apply_rope_fusion?",
        ),
        (
            "model",
            "overlap_grad_reduce",
            True,
            "... DistributedDataParallelConfig has one, set in trainer.megatron.ddp",
        ),
        ("model", "hidden_size", 64, "it follows from the model's config.json"),
        ("model", "sequence_parallel", True, "megarl sets it from trainer.parallel"),
        ("model", "tp_comm_overlap", True, "... packs differ in length"),
        ("model", "apply_rope_fusion", 1, "needs bool, got 1"),
        ("model", "moe_z_loss_coeff", "1", "needs float, null, got '1'"),
        ("model", "moe_router_dtype", "fp16", "needs fp32, fp64, got 'fp16'"),
        ("ddp", "bucket_size", True, "needs int, null, got True"),
        ("ddp", "use_megatron_fsdp", True, ""),
        ("optimizer", "lr", 1e-5, "megarl sets it from trainer.optimizer"),
        ("optimizer", "optimizer", "muon", "trainer.optimizer.type and kwargs choose the optimizer"),
    ],
)
def test_messages_name_the_field_and_the_reason(part: Any, name: str, value: Any, message: str) -> None:
    find_problems = engine_options.find_option_problems if part == "sglang" else partial(find_field_problems, part)
    (found,) = find_problems({name: value})
    assert has_parts(found, f"{name}: {message}")


def test_all_problems_are_reported_in_one_line() -> None:
    message = error_message(rollout={"engine": {"extra_args": {"pp_size": 2, "node_rank": 1}}})
    engine = "rollout.engine.extra_args: pp_size: ... raise rollout.tp instead; node_rank: megarl sets"
    assert has_parts(message, engine)
    message = error_message(trainer={"megatron": {"model": {"hidden_sise": 1, "fp16": True}}})
    model = "trainer.megatron.model: hidden_sise: ... hidden_size?; fp16: megarl sets it from model.dtype"
    assert has_parts(message, model)


def test_expert_parallel_size_is_that_of_the_engine() -> None:
    slots = {"slots_per_node": 4}
    run = make_run(placement=slots, rollout={"tp": 4, "engine": {"extra_args": {"ep_size": 4}}})
    assert run.rollout.engine.ep_size == 4
    message = error_message(placement=slots, rollout={"tp": 4, "engine": {"extra_args": {"ep_size": 2}}})
    assert message == "rollout: engine.extra_args: ep_size needs to be 1 or rollout.tp = 4, got 2"


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("true", True), ("0", False), ("False", False)])
def test_environment_that_reorders_weights_is_refused(value: str, is_refused: bool) -> None:
    found = list(engine_options.find_variable_problems({"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": value}))
    assert bool(found) == is_refused


NOT_DISTRIBUTED = {"optimizer": {"distributed": False}}
OVERLAP = {"overlap_param_gather": True, "overlap_grad_reduce": True}
BF16_GRADS = {"main_grads_dtype": "bfloat16", "use_precision_aware_optimizer": True}
FULL = {"recompute": {"granularity": "full"}}
COMBINATIONS = [
    ({"ddp": {"overlap_param_gather": True}}, {}, "needs ddp.overlap_grad_reduce"),
    ({"model": {"fp8": "hybrid"}}, {}, "model.fp8 and model.fp8_recipe need each other"),
    ({"model": {"moe_router_dtype": "fp64", "moe_router_fusion": True}}, {}, "needs moe_router_dtype: fp32"),
    ({"optimizer": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": False}}, {}, "needs use_precision"),
    ({"optimizer": {"exp_avg_dtype": "bfloat16"}}, {}, "needs use_precision_aware_optimizer"),
    ({"optimizer": BF16_GRADS}, {}, "needs ddp.grad_reduce_in_fp32: false"),
    ({"ddp": OVERLAP}, NOT_DISTRIBUTED, "needs optimizer.distributed: true"),
    ({"optimizer": {"optimizer_cpu_offload": True}}, NOT_DISTRIBUTED, "needs optimizer.distributed"),
    ({"model": {"cp_comm_type": "a2a"}}, {}, "needs parallel.cp > 1"),
    ({"model": {"moe_token_dispatcher_type": "flex"}}, {}, "needs parallel.etp * parallel.ep > 1"),
    ({"model": {"cpu_offloading": True}}, FULL, "needs parallel.pp = 1 and recompute"),
    ({"model": {"overlap_p2p_comm_warmup_flush": True}}, {}, "needs parallel.vpp > 1"),
]


@pytest.mark.parametrize(("megatron", "trainer", "message"), COMBINATIONS, ids=[c[2] for c in COMBINATIONS])
def test_combinations_that_cannot_work_are_refused(megatron: Any, trainer: Any, message: str) -> None:
    assert message in error_message(trainer={"megatron": megatron, **trainer})


def test_fields_reach_the_configuration() -> None:
    model = {"fp8": "hybrid", "fp8_recipe": "blockwise", "attention_backend": "fused"}
    run = make_run(trainer={"megatron": {"model": model, "ddp": {"overlap_grad_reduce": True}}})
    assert run.trainer.megatron.model == model
    assert [problem.split(":")[0] for problem in run.trainer.megatron.find_te_problems()] == [
        "trainer.megatron.model.attention_backend",
        "trainer.megatron.model.fp8",
    ]
    message = error_message(trainer={"moe": {"freeze_router": True, "aux_loss_coeff": 0.01}})
    assert message == "trainer.moe: aux_loss_coeff trains the routers, which are frozen, got 0.01"


SILENT_BUGS = {
    "model": ("calculate_per_token_loss", "mtp_num_layers", "softmax_type", "experimental_attention_variant"),
    "ddp": ("use_megatron_fsdp", "use_custom_fsdp", "fsdp_double_buffer"),
}
"""Fields without which silent bugs of megatron-core cannot be reached (docs/models.md)."""


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in SILENT_BUGS.items() for name in names])
def test_fields_of_silent_bugs_are_refused(part: Any, name: str) -> None:
    assert name in read_fields(part)
    (problem,) = find_field_problems(part, {name: 1})
    assert problem.startswith(f"{name}: ")
    assert "no such field" not in problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_size": 2}, "dp_size counts groups ... needs enable_dp_attention: true, got dp_size = 2"),
        ({"attn_dp_size": 3}, "attn_dp_size needs to divide rollout.tp, got 4 % 3 = 1"),
        ({"dp_size": 8, "enable_dp_attention": True}, "dp_size needs to divide rollout.tp, got 4 % 8 = 4"),
        (
            {"attn_dp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "attn_dp_size and dp_size state the same size; remove one",
        ),
        ({"moe_dense_tp_size": 2}, "moe_dense_tp_size needs to be 1 or rollout.tp = 4, got 2"),
        ({"enable_dp_lm_head": True}, "enable_dp_lm_head needs attn_dp_size above 1, got 1"),
        ({"moe_a2a_backend": "deepep"}, "moe_a2a_backend: deepep needs ep_size = rollout.tp = 4, got 1"),
    ],
)
def test_sizes_of_data_parallel_attention_fit_the_ranks_of_an_engine(options: dict[str, Any], message: str) -> None:
    slots = {"slots_per_node": 4}
    found = error_message(placement=slots, rollout={"tp": 4, "engine": {"extra_args": options}})
    assert has_parts(found, f"rollout: engine.extra_args: {message}")


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 1),
        ({"enable_dp_attention": True}, 1),
        ({"dp_size": 4, "enable_dp_attention": True}, 4),
        ({"attn_dp_size": 2, "moe_dense_tp_size": 1, "enable_dp_lm_head": True}, 2),
        ({"attn_dp_size": 4, "ep_size": 4, "moe_a2a_backend": "deepep", "deepep_mode": "auto"}, 4),
    ],
)
def test_groups_of_data_parallel_attention(options: dict[str, Any], groups: int) -> None:
    run = make_run(placement={"slots_per_node": 4}, rollout={"tp": 4, "engine": {"extra_args": options}})
    assert run.rollout.engine.attn_dp_size == groups
    assert run.rollout.engine.layout_options == {
        name: value for name, value in options.items() if name not in ("ep_size", "deepep_mode")
    }
