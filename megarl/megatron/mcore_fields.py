"""The fields of megatron-core's configurations that megarl sets by itself, for workers and for `megarl check`.

One of them is the attention backend. Transformer Engine falls back silently to kernels that store all attention scores,
quadratic in the length of a sequence. megarl never allows that, and reports at the start of a run what a GPU lacks.
What Transformer Engine 2.20 has for training in bfloat16 with packs (`thd`), with context parallelism unless the table
excludes it:

    backend   kernels        compute capability        sizes of the heads of keys and values
    fused     cuDNN          9.0 and later             multiples of 8 up to 128; 192 and 128 (MLA); on 9.0 up to 256
    flash     flash-attn 2   8.0 and later             multiples of 8 up to 256; on 8.6 and 8.9 up to 192
    flash     flash-attn 3   9.0                       the same
    flash     flash-attn 4   9.0 and later, cp = 1     the same

Imports neither torch nor megatron-core, because `megarl check` and `megarl doctor` do without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from megarl.cluster.placement.hardware import BLACKWELL, HOPPER, Capability, package_version
from megarl.config.megatron import MegatronConfig
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GatedDeltaNet, GroupedQueryAttention, LatentAttention

if TYPE_CHECKING:
    from megarl.config.trainer import OptimizerConfig


def needs_torch_layers(architecture: ModelArchitecture, megatron: MegatronConfig, dtype: str) -> bool:
    """Return whether layers are torch's, also where Transformer Engine is installed.

    It lacks an attention softcap, indexers, norms after row-parallel linears or of all heads together, and attention in
    float32 that does not store all scores. Its sliding windows, sinks and gated delta nets are not used.
    `trainer.megatron.model.transformer_impl: local` chooses torch's layers.

    Args:
        dtype: `float32` or `bfloat16`, of parameters and activations.
    """
    lacks_feature = any(
        a.post_norm or a.window or a.softcap is not None or a.sinks or a.full_qk_norm
        for a in architecture.attentions(GroupedQueryAttention)
    )
    lacks_feature |= bool(architecture.attentions(GatedDeltaNet))
    lacks_feature |= any(a.indexer for a in architecture.attentions(LatentAttention))
    return lacks_feature or dtype == "float32" or not megatron.allows_te_layers


def fusion_fields(
    architecture: ModelArchitecture, *, has_te: bool, te_layers: bool, has_wgrad_kernel: bool
) -> dict[str, bool]:
    """Return the fields of fused kernels: all that the model can use, none without Transformer Engine.

    SwiGLU has a fused kernel; Gemma's gated GELU, in the form that megarl uses, has none, and gpt-oss's is not used.

    Args:
        has_te: Transformer Engine's kernels can be called.
        te_layers: the layers are Transformer Engine's.
        has_wgrad_kernel: apex's kernel that accumulates weight gradients can be imported. megatron-core's own linears,
            such as the output layer, need it.
    """
    moe = te_layers and architecture.experts is not None
    return {
        "apply_rope_fusion": has_te and _has_rope_kernel(architecture),
        "bias_activation_fusion": has_te and architecture.activation == "silu",
        "bias_dropout_fusion": has_te,
        "gradient_accumulation_fusion": has_te and has_wgrad_kernel,
        "moe_grouped_gemm": moe,
        "moe_permute_fusion": moe,
        "moe_router_fusion": moe,
    }


def _has_rope_kernel(architecture: ModelArchitecture) -> bool:
    """Return whether a fused kernel computes RoPE: for latent attention YaRN only, on powers of two as Triton needs."""
    return all(
        a.rope.rope_type == "yarn"
        and all(n.bit_count() == 1 for n in (a.qk_rope_head_dim // 2, a.qk_nope_head_dim, a.v_head_dim))
        for a in architecture.attentions(LatentAttention)
    )


def override_model_fields(fields: Mapping[str, object], megatron: MegatronConfig, *, moe: bool) -> dict[str, object]:
    """Return `fields` of TransformerConfig with those of `trainer.megatron.model`, and those that follow from them.

    Args:
        moe: the model has experts; fields named `moe_...` are left out for models without.
    """
    out = dict(fields)
    out |= {name: value for name, value in megatron.model.items() if moe or not name.startswith("moe_")}
    if out.get("moe_router_dtype") == "fp64":
        out["moe_router_fusion"] = False  # the kernel has no float64
    if out.get("use_te_activation_func"):
        out["bias_activation_fusion"] = False  # the same operation
    if moe and out.get("fp8") is not None:
        # each expert's tokens are padded while they are routed, not once more before each GEMM
        out.setdefault("moe_router_padding_for_quantization", True)
    return out


def find_offload_problem(architecture: ModelArchitecture, megatron: MegatronConfig) -> str | None:
    """Return why Adam cannot run on the CPU, if it is to: megatron-core's cannot step float32 parameters there."""
    for mapping in architecture.parameter_maps().values() if megatron.offloads_adam else ():
        if mapping.dtype is not None and not mapping.frozen:
            return (
                "trainer.megatron.optimizer.optimizer_cpu_offload: needs all parameters in bfloat16, got float32 for "
                f"{mapping.parts[0][0].tensor}, as config.json says"
            )
    return None


def ddp_fields(config: OptimizerConfig, megatron: MegatronConfig, *, overlap: bool) -> dict[str, object]:
    """Return fields of DistributedDataParallelConfig: gradients in float32, and communication during passes.

    Args:
        overlap: overlap communication with passes where the configuration does not say; the distributed optimizer is
            needed to gather parameters, and the overlapped reduction to overlap it.
    """
    reduces = megatron.ddp.get("overlap_grad_reduce", overlap)
    return {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": overlap and reduces and config.distributed,
        "use_distributed_optimizer": config.distributed,
        **megatron.ddp,
    }


def optimizer_fields(config: OptimizerConfig, megatron: MegatronConfig, *, overlap: bool) -> dict[str, object]:
    """Return fields of OptimizerConfig, with the names of dtypes: float32 main parameters and optimizer state.

    Adam on the CPU updates all parameters there, and copies gradients and parameters meanwhile.

    Args:
        overlap: as in `ddp_fields`.
    """
    fields: dict[str, object] = {
        "optimizer": "adam",  # also where another one takes its place
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        **({"adam_beta1": config.beta1, "adam_beta2": config.beta2, "adam_eps": config.eps} if config.is_adam else {}),
        "clip_grad": config.clip_grad,
        "use_distributed_optimizer": config.distributed,
        "overlap_param_gather": ddp_fields(config, megatron, overlap=overlap)["overlap_param_gather"],
        "use_precision_aware_optimizer": megatron.offloads_adam,  # megatron-core copies from and to bfloat16 with it
        "store_param_remainders": False,
        "fp8_recipe": megatron.model.get("fp8_recipe"),
    }
    if megatron.offloads_adam:
        fields |= {"optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True}
    return fields | megatron.optimizer


KEY = "trainer.megatron.model.attention_backend"
USE_TORCH_LAYERS = "set trainer.megatron.model.transformer_impl: local, for torch's layers"

FLASH_ATTN_PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
"""Package by generation of flash-attn."""

FIRST_FLASH_ATTN_2, END_FLASH_ATTN_2 = (2, 1, 1), (2, 8, 4)
"""Transformer Engine uses flash-attn 2 from the first version on, and below the second."""

FIRST_FLASH_ATTN_2_ON_BLACKWELL = (2, 7, 3)


def attention_backend(megatron: MegatronConfig, capability: Capability) -> Literal["flash", "fused"]:
    """Return megatron-core's `attention_backend` on a GPU: the configured one, by default cuDNN where it can."""
    configured = megatron.model.get("attention_backend", "auto")
    if configured == "auto":
        return "fused" if capability >= HOPPER else "flash"
    return "flash" if configured == "flash" else "fused"


def find_attention_problem(
    architecture: ModelArchitecture, megatron: MegatronConfig, capability: Capability, *, cp: int
) -> str | None:
    """Return what Transformer Engine's layers lack on a GPU for their attention, and the remedies; None if nothing.

    Args:
        capability: compute capability of the GPU.
        cp: context-parallel size.
    """
    if attention_backend(megatron, capability) == "flash":
        return find_flash_attn_problem(megatron, capability, cp=cp) or _find_flash_size_problem(
            architecture, capability
        )
    gpu = _name(capability)
    if capability < HOPPER:
        return (
            f"{KEY}: fused needs compute capability 9.0 for packed sequences, got {gpu}; set flash, which needs "
            f"flash-attn 2, or {USE_TORCH_LAYERS}"
        )
    for keys, values in _head_sizes(architecture):
        fits = max(keys, values) <= 128 or (keys, values) == (192, 128)
        # cuDNN's kernels for wide heads of Hopper exclude MLA's other sizes
        fits |= capability == HOPPER and max(keys, values) <= 256 and (keys == values or min(keys, values) < 128)
        if not fits or keys % 8 or values % 8:
            return (
                f"{KEY}: fused has no kernel for heads of {keys} (keys) and {values} (values) on compute capability "
                f"{gpu}; set flash, which needs flash-attn, or {USE_TORCH_LAYERS}"
            )
    return None


def find_flash_attn_problem(megatron: MegatronConfig, capability: Capability, *, cp: int) -> str | None:
    """Return why no flash-attn is installed that Transformer Engine can use on a GPU, and the remedies; else None."""
    generations = [2, *([3] if capability == HOPPER else []), *([4] if capability >= HOPPER and cp == 1 else [])]
    pinned = megatron.model.get("flash_attention_version")
    usable = [each for each in generations if pinned in (None, each)]
    first = FIRST_FLASH_ATTN_2 if capability < BLACKWELL else FIRST_FLASH_ATTN_2_ON_BLACKWELL
    found = {each: package_version(FLASH_ATTN_PACKAGES[each]) for each in usable}
    if any(version and (each > 2 or first <= _numbers(version) < END_FLASH_ATTN_2) for each, version in found.items()):
        return None
    wanted = [f"flash-attn 2 ({_dotted(first)} or later, before {_dotted(END_FLASH_ATTN_2)})" if each == 2 else
              f"flash-attn {each}" for each in usable]  # fmt: skip
    with_cp = f" with context parallelism of {cp}" if cp > 1 else ""
    if not usable:
        return (
            f"trainer.megatron.model.flash_attention_version: {pinned} has no kernels on compute capability "
            f"{_name(capability)}{with_cp}, which has {' and '.join(map(str, generations))}"
        )
    lacking = f"got {found[2]}" if found.get(2) else "which is not installed"
    return (
        f"{KEY}: on compute capability {_name(capability)}{with_cp} flash needs {' or '.join(wanted)}, {lacking}; "
        f"install it, or {USE_TORCH_LAYERS}"
    )


def _find_flash_size_problem(architecture: ModelArchitecture, capability: Capability) -> str | None:
    largest = max(max(sizes) for sizes in _head_sizes(architecture))  # narrower values are padded
    if largest % 8 == 0 and largest <= (192 if capability in ((8, 6), (8, 9)) else 256):
        return None
    return f"{KEY}: flash has no kernel for heads of {largest} on compute capability {_name(capability)}; " + (
        USE_TORCH_LAYERS
    )


def _head_sizes(architecture: ModelArchitecture) -> set[tuple[int, int]]:
    """Return the distinct sizes of a head's keys and values."""
    grouped = {(a.head_dim, a.head_dim) for a in architecture.attentions(GroupedQueryAttention)}
    latent = architecture.attentions(LatentAttention)
    return grouped | {(a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim) for a in latent}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _name(capability: Capability) -> str:
    return _dotted(capability)
