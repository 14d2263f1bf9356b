"""megatron-core's configurations of every family on a pretended GPU with Transformer Engine, and without one.

Expected values follow from what megatron-core's documentation says about each field. A stand-in takes the place of each
of Transformer Engine's functions, because megatron-core refuses a fusion whose function is missing.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.config.megatron import MegatronConfig, MoeConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron import mcore_fields
from megarl.megatron.families.attention import GroupedQueryAttention, LatentAttention, Rope
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.mcore_fields import fusion_fields
from tests.megatron.rank_models import make_model, model_spec
from tests.megatron.ranks import run_ranks

PLAIN = (bool, int, float, str, list, type(None))


def describe(name: str, path: str, on_gpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return fields of the three configurations, and the multiple of a pack's tokens."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from megarl.megatron import mcore_fields
    from megarl.megatron.modeling import layer_spec
    from megarl.megatron.modeling.transformer_config import token_multiple, transformer_config

    kernels = ("fused_permute", "fused_permute_with_probs", "fused_unpermute", "fused_sort_chunks_by_index")
    kernels += ("fused_sort_chunks_by_index_with_probs",)
    architecture, _ = load_architecture_and_dtype(path)
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    megatron = MegatronConfig(model=options.get("model", {}))
    with (
        patch.object(platform, "compute_capability", lambda: options.get("capability", (9, 0))),
        patch.object(mcore_fields, "package_version", options.get("packages", {}).get),
        patch.multiple(moe_utils, create=True, **dict.fromkeys(kernels, SimpleNamespace())),
        patch.multiple(rope_utils, create=True, fused_apply_rotary_pos_emb_thd=SimpleNamespace()),
        patch.object(platform, "uses_transformer_engine", lambda: on_gpu),
        patch.object(layer_spec, "find_spec", lambda _: SimpleNamespace()),
        patch("megatron.core.transformer.transformer_config.is_te_min_version", lambda _: True),
    ):
        config = transformer_config(
            architecture,
            ParallelConfig(**options.get("parallel", {})),
            dtype,
            RecomputeConfig(**options.get("recompute", {})),
            megatron,
            MoeConfig(**options.get("moe", {})),
        )
        te_layers = layer_spec.layer_backend(architecture, megatron, dtype).te_layers
    plain = {name: value for name, value in vars(config).items() if isinstance(value, PLAIN)}
    return plain | {"te_layers": te_layers, "attention": config.attention_backend.name, "rows": token_multiple(config)}


def describe_all(cases: list[tuple[str, str, bool, dict[str, Any]]]) -> list[Any]:
    out: list[Any] = []
    for case in cases:
        try:
            out.append(describe(*case))
        except ConfigError as error:
            out.append(str(error))
    return out


ALWAYS = {
    "deallocate_pipeline_outputs": True,  # a stage keeps only what backward needs of an output that it has sent
    "variable_seq_lengths": True,  # stages tell each other the length of each pack
    "moe_token_dispatcher_type": "alltoall",  # the other built-in one cannot do variable lengths
    "bf16": True,
    "fp8": None,
    "rows": 1,
}
DENSE = {"moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_router_fusion": False}
NO_AUX_LOSS = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}  # unless it is asked for
MOE = dict.fromkeys(DENSE, True) | NO_AUX_LOSS
ON = {
    "apply_rope_fusion": True,
    "bias_activation_fusion": True,  # SwiGLU
    "bias_dropout_fusion": True,
    "gradient_accumulation_fusion": True,
    "te_layers": True,
}
TORCH = {"te_layers": False, "moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_router_fusion": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": ON | DENSE,
    "qwen3": ON | DENSE,
    "llama3": ON | DENSE,
    # a softcap and post-norms, which Transformer Engine lacks, and a gated GELU
    "gemma2": ON | DENSE | {"te_layers": False, "bias_activation_fusion": False},
    "qwen3_moe": ON | MOE,
    "mixtral": ON | MOE,
    # megatron-core's kernel computes YaRN only, and on heads whose sizes are powers of two
    "deepseek_v3": ON | MOE | {"apply_rope_fusion": False},
    "deepseek_v3 without yarn": ON | MOE | {"apply_rope_fusion": False},
}
ACT = ["moe_act", "layernorm"]
FLEX = {"moe_token_dispatcher_type": "flex"}
FP8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
A100, H100, B200 = (8, 0), (9, 0), (10, 0)
FLASH_2 = {"flash-attn": "2.8.3.post1"}
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # a matrix product in FP8 needs a multiple of 16 rows, on each rank
    "fp8": ("qwen3", {"model": FP8}, {"fp8": "hybrid", "rows": 16, "moe_router_padding_for_quantization": False}),
    "fp8 on ranks": ("qwen3", {"model": FP8, "parallel": {"tp": 2, "cp": 2}}, {"rows": 64}),
    "mxfp8": ("qwen3", {"model": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}, {"rows": 32}),
    "fp8 experts": ("qwen3_moe", {"model": FP8}, {"rows": 16, "moe_router_padding_for_quantization": True}),
    # an overlapped send reads the output after its start
    "interleaved": ("qwen3", {"parallel": {"pp": 2, "vpp": 2}}, {"deallocate_pipeline_outputs": False}),
    "a2a": ("qwen3", {"model": {"cp_comm_type": "a2a"}, "parallel": {"cp": 2}}, {"cp_comm_type": "a2a"}),
    "flex": ("qwen3_moe", {"model": FLEX, "parallel": {"ep": 2}}, FLEX),
    "no experts": ("qwen3", {"model": FLEX}, {"moe_token_dispatcher_type": "alltoall"}),
    # cuDNN has attention for packs from Hopper on; none of the backends is one that stores all scores
    "attention": ("qwen3", {}, {"attention": "fused", "te_layers": True}),
    "attention of MLA": ("deepseek_v3", {"capability": B200, "parallel": {"cp": 2}}, {"attention": "fused"}),
    "attention, auto": ("qwen3", {"model": {"attention_backend": "auto"}}, {"attention": "fused"}),
    "fused attention": ("qwen3", {"model": {"attention_backend": "fused"}}, {"attention": "fused"}),
    "A100": ("qwen3", {"capability": A100, "packages": FLASH_2}, {"attention": "flash", "te_layers": True}),
    "A100 with cp": ("qwen3", {"capability": A100, "packages": FLASH_2, "parallel": {"cp": 2}}, {"attention": "flash"}),
    "A100, torch": ("qwen3_moe", {"capability": A100, "model": {"transformer_impl": "local"}}, TORCH),
    "flash-attn 4": (
        "qwen3",
        {"model": {"attention_backend": "flash"}, "packages": {"flash-attn-4": "4.0.0b36"}},
        {"attention": "flash"},
    ),
    # megatron-core writes it to the environment of the process, which has models with layers of both kinds
    "attention of torch": ("gemma2", {}, {"attention": "fused", "te_layers": False}),
    # Transformer Engine's attention in float32 stores all scores
    "float32": ("qwen3_moe", {"dtype": "float32"}, TORCH),
    "fusion off": ("qwen3", {"model": {"apply_rope_fusion": False}}, {"apply_rope_fusion": False}),
    "fp64 router": ("qwen3_moe", {"model": {"moe_router_dtype": "fp64"}}, {"moe_router_fusion": False}),
    "router replay": ("qwen3_moe", {"moe": {"router_replay": "R2"}}, MOE | {"moe_router_fusion": False}),
    "aux loss": (
        "qwen3_moe",
        {"moe": {"aux_loss_coeff": 0.01, "aux_loss_scope": "global_batch"}},
        {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "global_aux_loss"},
    ),
    "aux loss of sequences": (
        "qwen3_moe",
        {"moe": {"aux_loss_coeff": 0.01, "aux_loss_scope": "sequence"}},
        {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    "block": ("qwen3", {"recompute": {"granularity": "full", "method": "block"}}, {"recompute_method": "block"}),
    "moe_act": ("qwen3_moe", {"recompute": {"granularity": "selective", "modules": ACT}}, {"recompute_modules": ACT}),
}
LOCAL = "set trainer.megatron.model.transformer_impl: local, for torch's layers"
ATTENTION = "trainer.megatron.model.attention_backend: "
FLASH = {"model": {"attention_backend": "flash"}}
ON_A100 = f"{ATTENTION}on compute capability 8.0 flash needs flash-attn 2 (2.1.1 or later, before 2.8.4), "
NO_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "no flash-attn": ({"capability": A100}, f"{ON_A100}which is not installed; install it, or {LOCAL}"),
    "flash-attn 4 only": (
        {"capability": A100, "packages": {"flash-attn-4": "4.0.0b36", "flash-attn-3": "3.0.0"}},
        f"{ON_A100}which is not installed; install it, or {LOCAL}",
    ),
    "too new": (
        {"capability": A100, "packages": {"flash-attn": "2.9.0"}},
        f"{ON_A100}got 2.9.0; install it, or {LOCAL}",
    ),
    "fused": (
        {"capability": A100, "model": {"attention_backend": "fused"}, "packages": FLASH_2},
        f"{ATTENTION}fused needs compute capability 9.0 for packed sequences, got 8.0; set flash, which needs "
        f"flash-attn 2, or {LOCAL}",
    ),
    "flash with cp": (
        {**FLASH, "capability": B200, "packages": {"flash-attn-4": "4.0.0b36"}, "parallel": {"cp": 2}},
        f"{ATTENTION}on compute capability 10.0 with context parallelism of 2 flash needs flash-attn 2 (2.7.3 or "
        f"later, before 2.8.4), which is not installed; install it, or {LOCAL}",
    ),
    "another generation": (
        {"model": {"attention_backend": "flash", "flash_attention_version": 3}, "capability": B200},
        "trainer.megatron.model.flash_attention_version: 3 has no kernels on compute capability 10.0, which has 2 and "
        "4",
    ),
}
"""Of qwen3 on a GPU: what attention lacks, with the two remedies."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": ({"model": FP8}, "trainer.megatron.model.fp8: hybrid needs CUDA and Transformer Engine"),
    "recompute": (
        {"recompute": {"granularity": "selective", "modules": ["layernorm"]}},
        "trainer.recompute.modules: layernorm needs CUDA and Transformer Engine",
    ),
}


Described = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def described(model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Described:
    """Descriptions of all cases, by kind and name: one process imports megatron-core for them all."""
    names = {"deepseek_v3 without yarn": "deepseek_v3 without query latent"}
    cases = {("gpu", name): (name, model_folder(names.get(name, name)), True, {}) for name in FAMILIES}
    cases |= {("cpu", name): (name, model_folder(names.get(name, name)), False, {}) for name in FAMILIES}
    cases |= {("option", case): (name, model_folder(name), True, of) for case, (name, of, _) in OPTIONS.items()}
    cases |= {
        ("no attention", case): ("qwen3", model_folder("qwen3"), True, of) for case, (of, _) in NO_ATTENTION.items()
    }
    cases |= {("refused", case): ("qwen3", model_folder("qwen3"), False, of) for case, (of, _) in REFUSED.items()}
    found = run_ranks(describe_all, 1, tmp_path_factory.mktemp("configs"), list(cases.values()))
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_fusions_of_a_family_are_on_with_transformer_engine(name: str, described: Described) -> None:
    want = ALWAYS | FAMILIES[name]
    assert {field: described["gpu", name][field] for field in want} == want


@pytest.mark.parametrize("name", FAMILIES)
def test_all_fusions_are_off_without_it(name: str, described: Described) -> None:
    want = ALWAYS | dict.fromkeys((*ON, *DENSE), False)
    assert {field: described["cpu", name][field] for field in want} == want


@pytest.mark.parametrize("case", OPTIONS)
def test_fields_of_the_configuration_win(case: str, described: Described) -> None:
    want = OPTIONS[case][2]
    assert {field: described["option", case][field] for field in want} == want


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_need_transformer_engine_are_refused_without_it(case: str, described: Described) -> None:
    assert described["refused", case] == REFUSED[case][1]


@pytest.mark.parametrize("case", NO_ATTENTION)
def test_a_gpu_without_attention_kernels_is_refused_before_the_model_is_built(case: str, described: Described) -> None:
    assert described["no attention", case] == NO_ATTENTION[case][1]


def heads(keys: int, values: int) -> Any:
    """Return what of an architecture decides about attention kernels: the sizes of the heads of keys and values."""
    sizes = {"qk_nope_head_dim": keys // 2, "qk_rope_head_dim": keys - keys // 2, "v_head_dim": values}
    common: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "rope": Rope(theta=1e4, max_positions=64)}
    latent = LatentAttention(q_lora_rank=None, kv_lora_rank=8, **sizes, **common)
    grouped = GroupedQueryAttention(num_kv_heads=1, head_dim=keys, **common)
    attention = grouped if keys == values else latent
    return SimpleNamespace(attentions=lambda kind: [attention] if isinstance(attention, kind) else [])


@pytest.mark.parametrize(
    ("keys", "values", "on_hopper", "on_blackwell", "flash_on_a100", "flash_on_l40s"),
    [
        (64, 64, True, True, True, True),
        (128, 128, True, True, True, True),
        (24, 16, True, True, True, True),
        (192, 128, True, True, True, True),  # MLA
        (256, 256, True, False, True, False),
        (192, 160, False, False, True, True),
        (576, 512, False, False, False, False),
        (20, 20, False, False, False, False),
    ],
)
def test_kernels_by_size_of_heads(
    keys: int,
    values: int,
    on_hopper: bool,
    on_blackwell: bool,
    flash_on_a100: bool,
    flash_on_l40s: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Transformer Engine's sources have it for training on packed sequences."""
    monkeypatch.setattr(mcore_fields, "package_version", FLASH_2.get)
    want = {H100: on_hopper, B200: on_blackwell, A100: flash_on_a100, (8, 9): flash_on_l40s}
    find = partial(mcore_fields.find_attention_problem, heads(keys, values), MegatronConfig(), cp=1)
    problems = {capability: find(capability) for capability in want}
    assert {capability: problem is None for capability, problem in problems.items()} == want
    for problem in filter(None, problems.values()):
        assert problem.startswith(ATTENTION)
        assert problem.endswith(LOCAL)


@pytest.mark.parametrize(
    ("sizes", "fused"),
    [
        ((64, 128, 128), True),  # DeepSeek-V3's: RoPE, other part of queries and keys, values
        ((8, 16, 32), True),
        ((12, 16, 32), False),
        ((8, 12, 32), False),
        ((8, 16, 10), False),
    ],
)
def test_latent_attention_has_a_rope_kernel_for_powers_of_two(
    sizes: tuple[int, int, int], fused: bool, model_folder: Any
) -> None:
    """Triton has no ranges of other lengths; megatron-core's kernel takes one of each size, and of half of RoPE's."""
    architecture, _ = load_architecture_and_dtype(model_folder("deepseek_v3"))
    rope, other, values = sizes
    (stated,) = architecture.attentions(LatentAttention)
    attention = replace(stated, qk_rope_head_dim=rope, qk_nope_head_dim=other, v_head_dim=values)
    architecture = replace(architecture, layers=tuple(replace(of, attention=attention) for of in architecture.layers))
    fields = fusion_fields(architecture, has_te=True, te_layers=True, has_wgrad_kernel=True)
    assert fields["apply_rope_fusion"] == fused


def describe_training() -> list[Any]:
    """Return DDP's and the optimizer's configuration, as they are by default and with fields set."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megatron.core.distributed import DistributedDataParallelConfig

    from megarl.megatron.mcore_fields import ddp_fields
    from megarl.megatron.training.optimizer import optimizer_config

    default, waits = MegatronConfig(), MegatronConfig(ddp={"overlap_grad_reduce": False})
    gathers_late = MegatronConfig(ddp={"overlap_param_gather": False})
    offloaded = MegatronConfig(
        model=FP8,
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000},
        optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "decoupled_lr": 2e-6},
    )
    adam, replicated = OptimizerConfig(lr=1e-6), OptimizerConfig(lr=1e-6, distributed=False)
    cases = [(adam, default, False), (adam, offloaded, False), (adam, default, True), (replicated, default, True)]
    cases += [(adam, waits, True), (adam, gathers_late, True)]
    ddp = [vars(DistributedDataParallelConfig(**ddp_fields(a, m, overlap=o))) for a, m, o in cases]
    return ddp + [vars(optimizer_config(a, m, torch.bfloat16, overlap=o)) for a, m, o in cases[:3]]


TRAINING = (
    {
        "grad_reduce_in_fp32": True,  # bfloat16 gradients of many micro-batches would be rounded at every addition
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "average_in_collective": False,
        "check_for_nan_in_grad": False,  # the update guard does it
        "num_distributed_optimizer_instances": 1,
    },
    {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000},
    # with other replicas on GPUs; the second without the distributed optimizer
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": False},
    # as configured
    {"overlap_grad_reduce": False, "overlap_param_gather": False},
    {"overlap_grad_reduce": True, "overlap_param_gather": False},
    {
        "optimizer": "adam",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_precision_aware_optimizer": False,
        "main_params_dtype": torch.float32,
        "exp_avg_dtype": torch.float32,
        "optimizer_cpu_offload": False,
        "overlap_param_gather": False,
        "decoupled_weight_decay": True,
        "fp8_recipe": None,
    },
    {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,  # as Megatron-LM demands
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True,
        "overlap_param_gather": True,
        "decoupled_lr": 2e-6,
        "fp8_recipe": "blockwise",
    },
    {"overlap_param_gather": True},
)


def test_gradient_and_optimizer_configurations(tmp_path: Any) -> None:
    for got, want in zip(run_ranks(describe_training, 1, tmp_path), TRAINING, strict=True):
        assert {name: got[name] for name in want} == want


def specs_of(model: Any) -> dict[str, Any]:
    """Return the layers of a model with two layers, as torch's and as Transformer Engine's."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from megarl.megatron.modeling.layer_spec import te_block_spec, torch_block_spec

    with patch("megatron.core.models.gpt.gpt_layer_specs.TESpecProvider", TESpecProvider):
        of_te = te_block_spec(model.config, vp_stage=None)
    return {"torch": torch_block_spec(model.architecture, range(2)), "Transformer Engine": of_te}


def cross_attentions(path: str) -> set[str]:
    blocks = specs_of(make_model(model_spec(path))).values()
    return {layer.submodules.cross_attention.__name__ for block in blocks for layer in block.layer_specs}


def test_no_layer_has_cross_attention(model_folder: Any, tmp_path: Any) -> None:
    assert run_ranks(cross_attentions, 1, tmp_path, model_folder("qwen3")) == {"IdentityOp"}


def layers_of_latent_attention(path: str) -> dict[str, Any]:
    """Return the layers that both specs name, those that are built, and those that megatron-core would build."""
    model = make_model(model_spec(path))
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    found = {}
    for name, block in specs_of(model).items():
        attention = block.layer_specs[0].submodules.self_attention
        owner = SimpleNamespace(config=model.config)
        built = attention.module._resolve_qk_norm_config(owner, attention.submodules)
        try:
            of_megatron = repr(MLASelfAttention._resolve_qk_norm_config(owner, attention.submodules))
        except ValueError as e:
            of_megatron = str(e)
        is_named = all(layer is getattr(attention.submodules, slot) for slot, layer in built.items())
        found[name] = (is_named, repr(built["linear_q_proj"]), of_megatron)
    return found


def test_latent_attention_without_query_latent_gets_no_norm_of_its_input(model_folder: Any, tmp_path: Any) -> None:
    found = run_ranks(layers_of_latent_attention, 1, tmp_path, model_folder("deepseek_v3 without query latent"))
    (of_torch, _, refusal), (of_te, projection, of_megatron) = found["torch"], found["Transformer Engine"]
    assert of_torch
    assert of_te
    # fails where megatron-core keeps the layers of a spec
    assert "q_layernorm" in refusal
    assert "non-trivial" in refusal
    assert f"'linear_q_proj': {projection}" not in of_megatron
