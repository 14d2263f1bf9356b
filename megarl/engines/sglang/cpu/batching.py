"""Batches of SGLang's CPU engine: attention of many sequences in one call, and a shared prompt computed once.

SGLang's `torch_native` attention calls PyTorch once per sequence and layer, which takes most of the time of a small
model. Here sequences whose lengths are equal after padding share a call:

KV cache rows of each sequence --gather--> keys, values [sequences, padded length] --> one attention call

The result of a sequence does not depend on the other sequences: its padding follows from its own length, and the kernel
computes every sequence and head of a call apart.

All samples of a group have the same prompt. Without a cache of prefixes, which deterministic inference does without,
SGLang would compute it for each of them. Here a prefill batch computes it once:

prefill batch --distinct prompts only--> model --> next-token logits, repeated for every request
                                            |----> keys and values, copied to the cache rows of the other requests
                                            '----> routes of the tokens, repeated for every request

Results do not change where those of a request do not depend on the batch.

Legend: N requests of a batch, M distinct prompts, B sequences of a call, S padded length, T packed tokens, H query
heads, K key heads, D head size.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod


LENGTH_MULTIPLE = 64
"""Sequences are padded to a multiple of this length."""

MAX_TOKENS = 4096
"""Largest number of padded tokens in a call, so that their keys and values stay in the processor's cache."""

PAGE_SIZE = 64
"""Tokens of a sequence that are adjacent in the KV cache, which makes gathering them faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """Sequences that share a call."""

    rows_B: Tensor
    """Their indices in the batch."""
    lengths_B: Tensor
    """Their numbers of keys."""
    cache_rows_BS: Tensor
    """Row of the KV cache of each position; padding repeats the last one."""
    padding_mask_B11S: Tensor
    """What to add to attention scores: 0, and -inf at padding."""


def group_sequences(lengths: Tensor, pool_rows: Tensor, req_to_token: Tensor) -> list[SequenceGroup]:
    """Return the groups of a batch.

    Args:
        lengths: number of keys of each sequence.
        pool_rows: row of each sequence in `req_to_token`.
        req_to_token: rows of the KV cache by sequence and position.
    """
    lengths = lengths.to(torch.int64)
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths.tolist()):
        by_size[-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE].append(row)
    groups = []
    for size, rows in sorted(by_size.items()):
        count = max(1, MAX_TOKENS // size)
        for begin in range(0, len(rows), count):
            rows_B = torch.tensor(rows[begin : begin + count])
            lengths_B, positions_S = lengths[rows_B], torch.arange(size)
            positions_BS = torch.minimum(positions_S, lengths_B[:, None] - 1)
            cache_rows_BS = req_to_token[:, :size][pool_rows[rows_B]].gather(1, positions_BS)
            mask_BS = torch.zeros(len(rows_B), size).masked_fill_(positions_S >= lengths_B[:, None], -torch.inf)
            groups.append(
                SequenceGroup(
                    rows_B=rows_B,
                    lengths_B=lengths_B,
                    cache_rows_BS=cache_rows_BS.to(torch.int64),
                    padding_mask_B11S=mask_BS[:, None, None],
                )
            )
    return groups


def decode(
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Sequence[SequenceGroup],
    scaling: float | None,
) -> Tensor:
    """Return the attention [T, H, D] of one query per sequence to all of its keys.

    Args:
        keys: key cache [rows, K, D].
        values: value cache, of the same shape.
        groups: the groups of the batch, whose sequences are the queries.
    """
    out_THD = torch.empty_like(query_THD)
    for group in groups:
        keys_BKSD, values_BKSD = _gather(keys, group), _gather(values, group)
        attended_BH1D = scaled_dot_product_attention(
            query_THD[group.rows_B, :, None],
            keys_BKSD,
            values_BKSD,
            attn_mask=group.padding_mask_B11S.to(query_THD.dtype),
            scale=scaling,
            enable_gqa=True,
        )
        out_THD[group.rows_B] = attended_BH1D[:, :, 0]
    return out_THD


def extend(
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Sequence[SequenceGroup],
    prefix_lengths: Tensor,
    scaling: float | None,
) -> Tensor:
    """Return the causal attention [T, H, D] of the queries of each sequence, which follow a prefix without queries.

    Args:
        query_THD: the queries of all sequences, in the order of the batch.
        keys: key cache [rows, K, D].
        values: value cache, of the same shape.
        groups: the groups of the batch.
        prefix_lengths: number of keys of each sequence before its first query.
    """
    out_THD = torch.empty_like(query_THD)
    num_queries = torch.empty_like(prefix_lengths, dtype=torch.int64)
    for group in groups:
        num_queries[group.rows_B] = group.lengths_B - prefix_lengths[group.rows_B]
    starts = torch.cumsum(num_queries, 0) - num_queries
    for group in groups:
        prefix_B1 = prefix_lengths[group.rows_B, None]
        positions_S = torch.arange(group.cache_rows_BS.shape[1])
        has_query_BS = (positions_S >= prefix_B1) & (positions_S < group.lengths_B[:, None])
        offsets_BS = (positions_S - prefix_B1).where(has_query_BS, torch.tensor(0))
        queries_BS = starts[group.rows_B, None] + offsets_BS
        keys_BKSD, values_BKSD = _gather(keys, group), _gather(values, group)
        attended_BHSD = scaled_dot_product_attention(
            query_THD[queries_BS].transpose(1, 2),
            keys_BKSD,
            values_BKSD,
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        out_THD[queries_BS[has_query_BS]] = attended_BHSD.transpose(1, 2)[has_query_BS]
    return out_THD


def _gather(cache: Tensor, group: SequenceGroup) -> Tensor:
    """Return the group's rows of a cache [rows, K, D], as [B, K, S, D]."""
    size, length = group.cache_rows_BS.shape
    rows = cache.view(len(cache), -1).index_select(0, group.cache_rows_BS.view(-1))
    return rows.view(size, length, *cache.shape[1:]).transpose(1, 2)


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


TOKEN_FIELDS = ("input_ids", "positions", "out_cache_loc")
"""Fields of SGLang's `ForwardBatch` with one entry per token."""

REQUEST_FIELDS = (
    "req_pool_indices",
    "req_pool_indices_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "orig_seq_lens",
    "extend_seq_lens",
    "extend_seq_lens_cpu",
    "extend_prefix_lens",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "top_logprobs_nums",
    "token_ids_logprobs",
    "lora_ids",
    "rids",
    "mm_inputs",
)
"""Fields with one entry per request."""

DERIVED_FIELDS = ("batch_size", "seq_lens_sum", "extend_num_tokens", "extend_start_loc", "num_token_non_padded")
"""Fields that are computed from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The distinct prompts of a prefill batch of N requests."""

    first_M: list[int]
    """First request of each of the M prompts."""
    prompt_N: list[int]
    """Index of each request's prompt."""


def find_shared_prompts(token_ids: Sequence[int], lengths: Sequence[int]) -> SharedPrompts:
    """Return the distinct prompts of a batch.

    Args:
        token_ids: the prompts of all requests, one after the other.
        lengths: their numbers of tokens.
    """
    index: dict[tuple[int, ...], int] = {}
    first_M, prompt_N, start = [], [], 0
    for request, length in enumerate(lengths):
        prompt = tuple(token_ids[start : start + length])
        if prompt not in index:
            index[prompt] = len(index)
            first_M.append(request)
        prompt_N.append(index[prompt])
        start += length
    return SharedPrompts(first_M=first_M, prompt_N=prompt_N)


def repeated_tokens(shared: SharedPrompts, lengths: Sequence[int]) -> list[int]:
    """Return, for each token of a batch, its index among the tokens of the distinct prompts.

    Args:
        lengths: number of tokens of each request.
    """
    starts = [0, *itertools.accumulate(lengths[request] for request in shared.first_M)]
    pairs = zip(shared.prompt_N, lengths, strict=True)
    return [token for prompt, length in pairs for token in range(starts[prompt], starts[prompt] + length)]


def use_shared_prefill_on_cpu() -> None:
    """Compute shared prompts of prefill batches once in this process; no-op if CUDA is available."""
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    prefill = EagerRunner._execute_extend

    def execute_extend(runner: Any, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        pool = runner.model_runner.token_to_kv_pool
        if pp_proxy_tensors is not None or type(pool) is not MHATokenToKVPool or not can_share(batch):
            return prefill(runner, batch, pp_proxy_tensors)
        lengths = list(batch.extend_seq_lens_cpu)
        shared = find_shared_prompts(batch.input_ids.tolist(), lengths)
        if len(shared.first_M) == len(lengths):
            return prefill(runner, batch, pp_proxy_tensors)
        output = prefill(runner, select_first(batch, shared.first_M), None)
        recorded = get_global_experts_capturer()
        if recorded is not None:
            routes = recorded.device_cache.buffer
            tokens = torch.tensor(repeated_tokens(shared, lengths))
            routes[: len(tokens)] = routes[tokens]
        rows_N = batch.out_cache_loc.split(lengths)
        copies = [
            (rows, rows_N[shared.first_M[prompt]])
            for request, (rows, prompt) in enumerate(zip(rows_N, shared.prompt_N, strict=True))
            if shared.first_M[prompt] != request
        ]
        targets, sources = (torch.cat(rows) for rows in zip(*copies, strict=True))
        for cache in (*pool.k_buffer, *pool.v_buffer):
            cache[targets] = cache[sources]
        output.next_token_logits = output.next_token_logits[shared.prompt_N]
        return output

    EagerRunner._execute_extend = execute_extend


def can_share(batch: Any) -> bool:
    """Return whether each request of the batch is a whole prompt, and nothing else distinguishes requests."""
    if batch.forward_mode.name != "EXTEND" or any(batch.extend_prefix_lens_cpu):
        return False
    if batch.capture_hidden_mode.need_capture():
        return False
    if any(x is not None for x in (*(batch.lora_ids or ()), *(batch.mm_inputs or ()))):
        return False
    if any(n > s for n, s in zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu or (), strict=False)):
        return False  # log-probabilities of the prompts are asked for
    known = {*TOKEN_FIELDS, *REQUEST_FIELDS, *DERIVED_FIELDS}
    others = [getattr(batch, field.name) for field in fields(batch) if field.name not in known]
    # an empty tensor, such as the prompt tokens whose log-probabilities are asked for, distinguishes nothing
    return not any(isinstance(value, Tensor) and value.numel() for value in others)


def select_first(batch: Any, requests: Sequence[int]) -> Any:
    """Return a batch with some of the requests."""
    selected = copy.copy(batch)
    lengths = list(batch.extend_seq_lens_cpu)
    for name in TOKEN_FIELDS:
        parts = getattr(batch, name).split(lengths)
        setattr(selected, name, torch.cat([parts[request] for request in requests]))
    for name in REQUEST_FIELDS:
        values = getattr(batch, name)
        if isinstance(values, Tensor):
            setattr(selected, name, values[list(requests)])
        elif values is not None:
            setattr(selected, name, [values[request] for request in requests])
    selected.batch_size = len(requests)
    selected.extend_num_tokens = len(selected.input_ids)
    selected.seq_lens_sum = int(selected.seq_lens.sum())
    selected.extend_start_loc = torch.cumsum(selected.extend_seq_lens, 0, dtype=batch.extend_start_loc.dtype)
    selected.extend_start_loc -= selected.extend_seq_lens
    if batch.num_token_non_padded is not None:
        selected.num_token_non_padded = batch.num_token_non_padded.new_tensor(selected.extend_num_tokens)
    return selected
