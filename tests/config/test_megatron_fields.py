"""The tables of megatron-core's fields against the installed megatron-core, and the checks of `trainer.megatron`."""

from __future__ import annotations

import ast
from fnmatch import filter as matching
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from megarl.config.megatron import find_field_problems
from megarl.config.megatron_fields import (
    ALLOWED,
    CLASS_OF,
    MEGATRON_VERSION,
    NEEDS_TE,
    NEEDS_TE_LAYERS,
    REFUSED,
    classify,
)
from tests.config.runs import error_message, has_parts, make_run

SOURCES = {
    "model": {
        "model_parallel_config.py": {"ModelParallelConfig"},
        "transformer/transformer_config.py": {"TransformerConfig", "MLATransformerConfig"},
    },
    "ddp": {"distributed/distributed_data_parallel_config.py": {"DistributedDataParallelConfig"}},
    "optimizer": {"optimizer/optimizer_config.py": {"OptimizerConfig"}},
}
COUNTS = {"model": 322, "ddp": 38, "optimizer": 63}

ANNOTATIONS = {
    "bool": {"bool", "Optional[bool]"},
    "int": {"int"},
    "int | null": {"Optional[int]", "Optional[Literal[2, 3, 4]]"},
    "float": {"float"},
    "float | null": {"Optional[float]"},
    "auto | flash | fused | unfused": {"AttnBackend"},
    "p2p | a2a | list": {"Optional[Union[str, List[str]]]"},
    "list": {"Optional[list[str]]"},
    "float32 | bfloat16": {"torch.dtype"},
}
"""Type of an allowed field -> annotations that it stands for; other types are some of the values of a Literal."""


def read_fields(part: str) -> dict[str, str]:
    """Return the annotation of each field, from megatron-core's source: importing it would import torch."""
    root = Path(str(distribution("megatron-core").locate_file("megatron/core")))
    return {
        entry.target.id: ast.unparse(entry.annotation)
        for file, classes in SOURCES[part].items()
        for node in ast.walk(ast.parse((root / file).read_text()))
        if isinstance(node, ast.ClassDef) and node.name in classes
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }


@pytest.mark.parametrize("part", CLASS_OF)
def test_every_field_of_megatron_is_in_exactly_one_table(part: Any) -> None:
    assert distribution("megatron-core").version == MEGATRON_VERSION
    fields = read_fields(part)
    assert len(fields) == COUNTS[part]
    assert {name: entries for name in fields if len(entries := classify(part, name)) != 1} == {}


@pytest.mark.parametrize("part", CLASS_OF)
def test_tables_name_nothing_else_and_have_megatrons_types(part: Any) -> None:
    fields = read_fields(part)
    listed = [*ALLOWED[part], *(name for refused in REFUSED[part] for name in refused.names)]
    assert [name for name in listed if not matching(sorted(fields), name)] == []
    assert len(listed) == len(set(listed))
    for name, kind in ALLOWED[part].items():
        if kind in ANNOTATIONS:
            assert fields[name] in ANNOTATIONS[kind], name
        else:
            values = [each for each in kind.split(" | ") if each != "null"]
            assert "Literal" in fields[name], name
            assert all(f"'{value}'" in fields[name] for value in values), name


def test_fields_that_need_transformer_engine_are_allowed() -> None:
    assert {*NEEDS_TE, *NEEDS_TE_LAYERS} <= ALLOWED["model"].keys()


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (
            "model",
            {"apply_rope_fuzion": True},
            "apply_rope_fuzion: megatron-core's TransformerConfig has no such field; did you mean apply_rope_fusion?",
        ),
        (
            "model",
            {"overlap_grad_reduce": True},
            "overlap_grad_reduce: ... DistributedDataParallelConfig has one, set in trainer.megatron.ddp",
        ),
        ("model", {"hidden_size": 64}, "hidden_size: it follows from the model's config.json"),
        ("model", {"sequence_parallel": True}, "sequence_parallel: megarl sets it from trainer.parallel"),
        ("model", {"tp_comm_overlap": True}, "tp_comm_overlap: ... packs differ in length"),
        ("model", {"apply_rope_fusion": 1}, "apply_rope_fusion: needs bool, got 1"),
        ("model", {"moe_z_loss_coeff": "1"}, "moe_z_loss_coeff: needs float, null, got '1'"),
        ("model", {"moe_router_dtype": "fp16"}, "moe_router_dtype: needs fp32, fp64, got 'fp16'"),
        ("ddp", {"bucket_size": True}, "bucket_size: needs int, null, got True"),
        ("ddp", {"use_megatron_fsdp": True}, "use_megatron_fsdp: "),
        ("optimizer", {"lr": 1e-5}, "lr: megarl sets it from trainer.optimizer"),
        ("optimizer", {"optimizer": "muon"}, "optimizer: checkpoints hold the two moments of Adam"),
    ],
)
def test_message(part: Any, fields: dict[str, Any], message: str) -> None:
    (got,) = find_field_problems(part, fields)
    assert has_parts(got, message)


def test_all_problems_are_reported_with_their_key() -> None:
    message = error_message(trainer={"megatron": {"model": {"hidden_sise": 1, "fp16": True}}})
    assert has_parts(
        message, "trainer.megatron.model: hidden_sise: ... hidden_size?; fp16: megarl sets it from model.dtype"
    )


NOT_DISTRIBUTED = {"optimizer": {"distributed": False}}
OVERLAP = {"overlap_param_gather": True, "overlap_grad_reduce": True}
BF16_GRADS = {"main_grads_dtype": "bfloat16", "use_precision_aware_optimizer": True}
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
    (
        {"model": {"cpu_offloading": True}},
        {"recompute": {"granularity": "full"}},
        "needs parallel.pp = 1 and recompute",
    ),
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
