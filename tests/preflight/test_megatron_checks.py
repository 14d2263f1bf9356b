"""Checks of `trainer.megatron` and `trainer.moe` against the model."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import SftConfig
from megarl.megatron.families.load_architecture import load_architecture
from megarl.preflight.megatron_checks import describe_megatron, find_megatron_problems
from tests.megatron.families.tiny import DEEPSEEK_V3, QWEN3_MOE
from tests.megatron.fidelity.models import CONFIGS

GEMMA2 = CONFIGS["gemma2"] | {"architectures": ["Gemma2ForCausalLM"]}
QWEN3 = CONFIGS["qwen3"] | {"architectures": ["Qwen3ForCausalLM"]}
MODEL = "trainer.megatron.model"


def problems(hf_config: dict[str, Any], device: str = "cuda", **trainer: Any) -> list[str]:
    slots = 8 if trainer.get("parallel") else 1
    config = SftConfig.model_validate(
        {
            "run_dir": "r",
            "model": {"path": "m", "dtype": trainer.pop("dtype", "auto")},
            "data": {"path": "d"},
            "placement": {"slots_per_node": slots},
            "trainer": trainer,
        }
    )
    return list(find_megatron_problems(config, load_architecture(hf_config, origin="config.json"), device))


def model(**fields: Any) -> dict[str, Any]:
    return {"megatron": {"model": fields}}


FP8 = model(fp8="hybrid", fp8_recipe="blockwise")


@pytest.mark.parametrize(
    ("hf_config", "trainer", "want"),
    [
        (QWEN3, FP8, []),
        (QWEN3, FP8 | {"dtype": "float32"}, [f"{MODEL}.fp8: needs model.dtype: bfloat16, got float32"]),
        (GEMMA2, FP8, [f"{MODEL}.fp8: has no effect on Gemma2ForCausalLM, whose layers are torch's"]),
        (QWEN3, {"moe": {"freeze_router": True}}, ["trainer.moe: Qwen3ForCausalLM has no experts"]),
        (QWEN3_MOE, {"moe": {"freeze_router": True}}, []),
        (QWEN3, model(moe_permute_fusion=True), [f"{MODEL}.moe_permute_fusion: Qwen3ForCausalLM has no experts"]),
        (QWEN3_MOE, model(cp_comm_type="a2a") | {"parallel": {"cp": 2, "tp": 2}}, []),
        (
            QWEN3_MOE,
            model(cp_comm_type="a2a") | {"parallel": {"cp": 2, "tp": 4}},
            [
                f"{MODEL}.cp_comm_type: a2a divides the key-value heads of a tensor-parallel rank over parallel.cp "
                "ranks, got 4 / 4 % 2 = 1"
            ],
        ),
        (
            DEEPSEEK_V3,
            model(cp_comm_type="a2a") | {"parallel": {"cp": 2}},
            [f"{MODEL}.cp_comm_type: Transformer Engine has only p2p for latent attention, got a2a"],
        ),
        (
            QWEN3,
            model(cp_comm_type=["p2p", "all_gather"]) | {"parallel": {"cp": 2}},
            [
                f"{MODEL}.cp_comm_type: needs p2p or a2a, which Transformer Engine has for packed sequences, got "
                "all_gather",
                f"{MODEL}.cp_comm_type: needs one entry for each of 4 layers, got 2",
            ],
        ),
    ],
)
def test_fields_have_to_fit_the_model(hf_config: dict[str, Any], trainer: dict[str, Any], want: list[str]) -> None:
    assert problems(hf_config, **trainer) == want


def test_fields_of_transformer_engine_are_refused_on_the_cpu() -> None:
    recompute = {"granularity": "selective", "modules": ["layernorm"]}
    assert problems(QWEN3, "cpu", **FP8, recompute=recompute) == [
        f"{MODEL}.fp8: hybrid needs CUDA and Transformer Engine",
        "trainer.recompute.modules: layernorm needs CUDA and Transformer Engine",
    ]
    assert problems(QWEN3, "cpu", **model(apply_rope_fusion=False)) == []
    on_host = {"megatron": {"optimizer": {"optimizer_cpu_offload": True}}}
    assert problems(QWEN3, "cuda", **on_host) == problems(QWEN3, "cpu", **on_host, dtype="bfloat16") == []
    assert problems(QWEN3, "cpu", **on_host) == [
        "trainer.megatron.optimizer.optimizer_cpu_offload: needs model.dtype: bfloat16, got float32"
    ]


def test_description_differs_by_model_and_device() -> None:
    config = SftConfig.model_validate({"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}})

    def describe(hf_config: dict[str, Any], device: str | None) -> str:
        return " ".join(describe_megatron(config, load_architecture(hf_config, origin="config.json"), device))

    assert "apply_rope_fusion=false" in describe(QWEN3, "cpu")
    assert "moe_permute_fusion=true" in describe(QWEN3_MOE, "cuda")
    assert "megatron: torch layers" in describe(GEMMA2, None)
    assert "bias_activation_fusion=false" in describe(GEMMA2, None)
