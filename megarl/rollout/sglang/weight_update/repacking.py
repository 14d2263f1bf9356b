"""Finds modules whose weights SGLang changes after it has loaded them.

SGLang calls `process_weights_after_loading` of every module's `quant_method` at the end of a load and of each weight
update. For plain weights it does nothing. Some kernels need another layout, and the call then packs, permutes or
quantizes the parameters: boxes of the model's layout do not fit any more, and if an update is aborted, packing again
what was never unpacked gives other weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PLAIN_EXPERT_RUNNERS = frozenset({"triton", "deep_gemm", "cutlass"})
"""SGLang's backends for experts in FP8 that read the weights as they are loaded, unless DeepGEMM changes the scales."""


def find_repacked_modules(model: nn.Module) -> list[str]:
    """Return `name (class of its quant_method)` for each module whose weights are not kept as they are loaded."""
    return [
        f"{name} ({type(method).__name__})"
        for name, module in model.named_modules()
        if (method := getattr(module, "quant_method", None)) is not None and not _keeps_layout(module, method)
    ]


def _keeps_layout(module: nn.Module, method: Any) -> bool:
    """Return whether `process_weights_after_loading` leaves the weights of this module as they are."""
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.layers.quantization.fp8 import Fp8KVCacheMethod, Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

    process = getattr(type(method), "process_weights_after_loading", None)
    if process is None or process is QuantizeMethodBase.process_weights_after_loading:
        return True
    if getattr(module, "use_intel_amx_backend", False):  # packed for AMX
        return False
    if type(method) in (UnquantizedLinearMethod, Fp8KVCacheMethod):
        return True
    if type(method) in (Fp8LinearMethod, Fp8MoEMethod):
        return _keeps_fp8_blocks(module, method)
    if type(method) is not UnquantizedFusedMoEMethod:
        return False
    is_interleaved = getattr(module, "w13_swiglu_interleaved", False)
    return not method.use_flashinfer_trtllm_moe and not is_interleaved and torch.version.hip is None


def _keeps_fp8_blocks(module: nn.Module, method: Any) -> bool:
    """Return whether a module in FP8 keeps values, and float32 scales of blocks of 128 x 128, as they are loaded.

    It does not where DeepGEMM needs scales that are powers of two, as on Blackwell GPUs, where Marlin or FlashInfer
    kernels need another order, with another block size, and on AMD GPUs.
    """
    if not method.block_quant or method.weight_block_size != [128, 128] or torch.version.hip is not None:
        return False
    if method.use_mxfp8 or getattr(method, "use_marlin", False) or getattr(method, "block_fp8_as_mxfp8", False):
        return False
    if getattr(method, "is_fp4_expert", False) or getattr(module, "_block_fp8_bf16_weight", None) is not None:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    scales = [parameter for name, parameter in parameters.items() if name.endswith("weight_scale_inv")]
    are_plain = all(
        scale.dtype == torch.float32 and scale.is_contiguous() and not getattr(scale, "format_ue8m0", False)
        for scale in scales
    )
    if not scales or not are_plain:
        return False
    find_runner = getattr(method, "get_moe_runner_backend", None)  # of experts
    runner = None if find_runner is None else find_runner(module)
    return runner is None or runner.value in PLAIN_EXPERT_RUNNERS
