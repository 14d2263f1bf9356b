"""Support for multi-head latent attention (MLA, DeepSeek-V3) on SGLang's CPU engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod


def use_absorbed_mla_on_cpu() -> None:
    """Use the absorbed form of MLA for prefill as well; no-op if CUDA is available.

    For prompts without a cached prefix, SGLang expands the latents to per-head keys. But its CPU attention reads keys
    only from the KV cache, which holds the latents.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def always_absorbed(_attention: object, _batch: object) -> AttnForwardMethod:
        return handlers.AttnForwardMethod.MLA

    handlers.AttentionBackendRegistry.register("torch_native", always_absorbed)
