"""The fields of megatron-core's configurations that megarl sets by itself, for workers and for `megarl check`.

Imports neither torch nor megatron-core, because `megarl check` does without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarl.megatron.families.attention import GatedDeltaNet, GroupedQueryAttention, LatentAttention

if TYPE_CHECKING:
    from megarl.config.megatron import MegatronConfig
    from megarl.config.trainer import OptimizerConfig
    from megarl.megatron.families.architecture import ModelArchitecture


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
