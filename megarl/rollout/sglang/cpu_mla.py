"""Lets models with multi-head latent attention (DeepSeek-V3) run on SGLang's CPU engine."""

from __future__ import annotations

from typing import Any

import torch


def attend_to_latents_on_cpu() -> None:
    """Fold queries into the space of the latents for prompts as well; nothing where CUDA is available.

    For prompts without a prefix SGLang expands latents to each head's keys, but its CPU attention reads keys from the
    cache only, where latents are.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def always_folded(_attention: Any, _batch: Any) -> Any:
        return handlers.AttnForwardMethod.MLA

    handlers.AttentionBackendRegistry.register("torch_native", always_folded)
