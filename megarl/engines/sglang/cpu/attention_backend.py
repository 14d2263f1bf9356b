"""Makes SGLang's CPU engine use the attention of this package; installed in scheduler processes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.engines.sglang.cpu.batched_attention import SequenceGroup, decode, extend, group_sequences

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


ALIGNED_ELEMENTS = 16
"""Float32 numbers of a vector register, to whose size PyTorch aligns tensors."""


def use_batched_attention_on_cpu() -> None:
    """Replace the `torch_native` attention backend in this process; no-op if CUDA is available."""
    if torch.cuda.is_available():
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """Attention to all previous tokens; other kinds are left to SGLang."""

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self._deterministic = model_runner.server_args.enable_deterministic_inference
            self._groups: list[SequenceGroup] | None = None
            self.get_cpu_graph_seq_len_fill_value = lambda: 1  # of sequences that data-parallel attention adds

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._groups = None  # those of the next layer's call serve all further layers

        def _run_sdpa_forward_decode(
            self,
            query: Tensor,
            output: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            req_to_token: Tensor,
            req_pool_indices: Tensor,
            seq_lens: Tensor,
            encoder_lens: Tensor | None = None,
            **options: Any,
        ) -> Tensor:
            if encoder_lens is not None or not self._is_supported(query, k_cache, v_cache, options):
                attended: Tensor = super()._run_sdpa_forward_decode(
                    query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
                )
                return attended
            groups = self._group(seq_lens, req_pool_indices, req_to_token)
            return output.copy_(decode(query, k_cache, v_cache, groups, options["scaling"]))

        def _run_sdpa_forward_extend(
            self,
            query: Tensor,
            output: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            req_to_token: Tensor,
            req_pool_indices: Tensor,
            seq_lens: Tensor,
            extend_prefix_lens: Tensor,
            extend_seq_lens: Tensor,
            encoder_lens: Tensor | None = None,
            **options: Any,
        ) -> Tensor:
            is_causal = encoder_lens is None and options["causal"]
            if not is_causal or not self._is_supported(query, k_cache, v_cache, options):
                lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
                attended: Tensor = super()._run_sdpa_forward_extend(
                    query, output, k_cache, v_cache, req_to_token, req_pool_indices, *lengths, **options
                )
                return attended
            groups = self._group(seq_lens, req_pool_indices, req_to_token)
            return output.copy_(extend(query, k_cache, v_cache, groups, extend_prefix_lens, options["scaling"]))

        def _is_supported(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]) -> bool:
            # sums depend on the alignment of the kernel's operands, which is that of each thread's scratch memory
            is_invariant = torch.get_num_threads() == 1 and query.shape[-1] % ALIGNED_ELEMENTS == 0
            return (
                options["sliding_window_size"] is None
                and query.dtype == k_cache.dtype == v_cache.dtype
                and query.shape[-1] == k_cache.shape[-1] == v_cache.shape[-1]
                and (is_invariant or not self._deterministic)
            )

        def _group(self, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor) -> list[SequenceGroup]:
            if self._groups is None:
                self._groups = group_sequences(seq_lens, req_pool_indices, req_to_token)
            return self._groups

    register_attention_backend("torch_native")(BatchedAttention)
