"""Checks of `trainer.megatron` against models and machines, and a description of what megatron-core is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megarl.config.megatron_fields import NEEDS_TE_LAYERS
from megarl.config.run import StageConfig
from megarl.megatron.attention_kernels import find_attention_problem
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention, LatentAttention
from megarl.megatron.mcore_fields import (
    ddp_fields,
    fusion_fields,
    needs_torch_layers,
    optimizer_fields,
    override_model_fields,
)
from megarl.placement.gpu_types import GpuType
from megarl.placement.hardware import package_version

LINE_WIDTH = 110


def find_megatron_problems(config: StageConfig, model: ModelArchitecture, device: str | None) -> Iterator[str]:
    """Find fields of `trainer.megatron` and `trainer.moe` that do not fit the policy or the device.

    Args:
        device: `cpu`, `cuda`, or None where it is unknown.
    """
    trainer, key = config.trainer, "trainer.megatron.model"
    if device == "cpu":
        yield from trainer.megatron.find_te_problems()
        yield from trainer.recompute.find_te_problems()
    if model.experts is None:
        for name in trainer.megatron.model:
            if name.startswith("moe_"):
                yield f"{key}.{name}: {model.name} has no experts"
        if trainer.moe.freeze_router or trainer.moe.aux_loss_coeff:
            yield f"trainer.moe: {model.name} has no experts"
    num_chunks = trainer.megatron.model.get("mlp_chunks_for_training", 1)
    if model.experts is not None and num_chunks != 1:
        yield f"{key}.mlp_chunks_for_training: the routers of {model.name} need whole micro-batches, got {num_chunks}"
    dtype = config.model.dtype
    if trainer.megatron.offloads_adam and (dtype == "float32" or (dtype == "auto" and device == "cpu")):
        yield "trainer.megatron.optimizer.optimizer_cpu_offload: needs model.dtype: bfloat16, got float32"
    te_layers = _has_te_layers(config, model)
    for name in () if te_layers else NEEDS_TE_LAYERS:
        if name in trainer.megatron.model and dtype == "float32":
            yield f"{key}.{name}: needs model.dtype: bfloat16, got float32"
        elif name in trainer.megatron.model:
            yield f"{key}.{name}: has no effect on {model.name}, whose layers are torch's"
    for name, fits in fusion_fields(model, has_te=True, te_layers=te_layers, has_wgrad_kernel=True).items():
        if trainer.megatron.model.get(name) and not fits and (model.experts or not name.startswith("moe_")):
            yield f"{key}.{name}: no fused kernel fits the layers of {model.name}"
    yield from _find_a2a_problems(config, model)


def find_attention_problems(config: StageConfig, model: ModelArchitecture, gpus: Iterable[GpuType]) -> Iterator[str]:
    """Find out whether Transformer Engine's layers lack attention kernels on one of the types of GPUs.

    flash-attn that the configuration names is taken to be installed on the GPUs' nodes if this machine has no
    Transformer Engine, so that it cannot be one of them.
    """
    megatron = config.trainer.megatron
    if not _has_te_layers(config, model):
        return
    is_elsewhere = megatron.model.get("attention_backend") == "flash" and package_version("transformer-engine") is None
    for capability in () if is_elsewhere else dict.fromkeys(gpu.capability for gpu in gpus):
        problem = find_attention_problem(model, megatron, capability, cp=config.trainer.parallel.cp)
        if problem is not None:
            yield problem


def _has_te_layers(config: StageConfig, model: ModelArchitecture) -> bool:
    """Return whether the policy's layers are Transformer Engine's on GPUs that have it."""
    return not needs_torch_layers(model, config.trainer.megatron, config.model.resolved_dtype("cuda"))


def _find_a2a_problems(config: StageConfig, model: ModelArchitecture) -> Iterator[str]:
    kinds, key = config.trainer.megatron.model.get("cp_comm_type"), "trainer.megatron.model.cp_comm_type"
    if kinds is None:
        return
    unknown = sorted(set([kinds] if isinstance(kinds, str) else kinds) - {"p2p", "a2a"})
    if unknown:
        yield f"{key}: needs p2p or a2a, which Transformer Engine has for packed sequences, got {', '.join(unknown)}"
    if isinstance(kinds, list) and len(kinds) != model.num_layers:
        yield f"{key}: needs one entry for each of {model.num_layers} layers, got {len(kinds)}"
    if "a2a" not in kinds:
        return
    tp, cp = config.trainer.parallel.tp, config.trainer.parallel.cp
    match model.attention:
        case LatentAttention():
            yield f"{key}: Transformer Engine has only p2p for latent attention, got a2a"
        case GroupedQueryAttention(num_kv_heads=heads) if (heads // tp) % cp:
            yield (
                f"{key}: a2a divides the key-value heads of a tensor-parallel rank over parallel.cp ranks, got "
                f"{heads} / {tp} % {cp} = {heads // tp % cp}"
            )


def describe_megatron(config: StageConfig, model: ModelArchitecture, device: str | None) -> list[str]:
    """Return lines with the fields of megatron-core that matter for speed and memory, as the policy's ranks set them.

    Args:
        device: as in `find_megatron_problems`; Transformer Engine and apex are taken to be on GPUs.
    """
    has_te, megatron, optimizer = device != "cpu", config.trainer.megatron, config.trainer.optimizer
    te_layers, parallel = has_te and _has_te_layers(config, model), config.trainer.parallel
    fusions = fusion_fields(model, has_te=has_te, te_layers=te_layers, has_wgrad_kernel=has_te)
    layers = "Transformer Engine" if te_layers else "torch"
    overlap = has_te and config.placement.slots > parallel.tp * parallel.pp
    adam = optimizer_fields(optimizer, megatron, overlap=overlap)
    shown = {name: value for name, value in adam.items() if name not in ("optimizer", "lr", "min_lr", "fp8_recipe")}
    return [
        f"megatron: {layers} layers" + ("" if has_te else ", no fused kernels on the CPU"),
        *_lines("model", override_model_fields(fusions, megatron, moe=model.experts is not None)),
        *_lines("ddp", ddp_fields(optimizer, megatron, overlap=overlap)),
        *_lines("optimizer", shown),
    ]


def _lines(part: str, fields: Mapping[str, object]) -> list[str]:
    """Return `megatron.<part>: a=true, b=1, ...`, in as many lines as needed."""
    lines = [f"megatron.{part}:"]
    for name, value in fields.items():
        text = f" {name}={str(value).lower() if value is None or isinstance(value, bool) else value}"
        if len(lines[-1]) + len(text) > LINE_WIDTH:
            lines.append("    ")
        lines[-1] += text
    return lines
