"""Computes a prompt once that several requests of a prefill batch share, on SGLang's CPU engine.

All samples of a group have the same prompt. Without a cache of prefixes, which deterministic inference does without,
SGLang would compute it for each of them:

prefill batch --distinct prompts only--> model --> next-token logits, repeated for every request
                                            |----> keys and values, copied to the cache rows of the other requests
                                            '----> routes of the tokens, repeated for every request

Results do not change where those of a request do not depend on the batch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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
    others = [getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name not in known]
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
