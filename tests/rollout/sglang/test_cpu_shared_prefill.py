"""Distinct prompts of a prefill batch; that an engine's results stay the same is in `test_cpu_determinism.py`."""

from __future__ import annotations

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megarl.rollout.sglang.cpu_shared_prefill import _can_share, _select, find_shared_prompts
from tests.rollout.remote import requests

PROMPTS = [(5, 6, 7), (5, 6), (5, 6, 7), (8,), (5, 6), (5, 6, 7, 8)]


def make_batch(prompts: list[tuple[int, ...]], first_row: int = 10) -> Any:
    """Return the fields of SGLang's `ForwardBatch` that matter."""
    lengths = [len(prompt) for prompt in prompts]
    seq_lens = torch.tensor(lengths)
    fields = {
        "input_ids": torch.tensor([token for prompt in prompts for token in prompt]),
        "positions": torch.cat([torch.arange(n) for n in lengths]),
        "out_cache_loc": torch.arange(sum(lengths)) + first_row,
        "req_pool_indices": torch.arange(len(prompts)) + 3,
        "req_pool_indices_cpu": None,
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens,
        "orig_seq_lens": seq_lens,
        "extend_seq_lens": seq_lens,
        "extend_seq_lens_cpu": lengths,
        "extend_prefix_lens": torch.zeros_like(seq_lens),
        "extend_prefix_lens_cpu": [0] * len(prompts),
        "extend_start_loc": torch.cumsum(seq_lens, 0) - seq_lens,
        "extend_logprob_start_lens_cpu": lengths,
        "top_logprobs_nums": [0] * len(prompts),
        "token_ids_logprobs": [None] * len(prompts),
        "lora_ids": [None] * len(prompts),
        "rids": None,
        "mm_inputs": None,
        "batch_size": len(prompts),
        "seq_lens_sum": sum(lengths),
        "extend_num_tokens": sum(lengths),
        "num_token_non_padded": None,
        "input_embeds": None,
        "extend_input_logprob_token_ids_gpu": torch.zeros(0),
        "capture_hidden_mode": SimpleNamespace(need_capture=lambda: False),
        "forward_mode": SimpleNamespace(name="EXTEND"),
    }
    return make_dataclass("Batch", fields)(**fields)


def test_distinct_prompts_are_found() -> None:
    shared = find_shared_prompts([token for prompt in PROMPTS for token in prompt], [len(p) for p in PROMPTS])
    assert shared.first_M == [0, 1, 3, 5]
    assert [PROMPTS[shared.first_M[prompt]] for prompt in shared.prompt_N] == PROMPTS


def test_a_batch_of_the_distinct_prompts() -> None:
    batch = make_batch(PROMPTS)
    selected = _select(batch, [0, 3, 5])
    expected = make_batch([PROMPTS[0], PROMPTS[3], PROMPTS[5]])
    expected.out_cache_loc = torch.tensor([10, 11, 12, 18, 21, 22, 23, 24])
    expected.req_pool_indices = torch.tensor([3, 6, 8])
    for name, value in vars(expected).items():
        got = getattr(selected, name)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value or "mode" in name, name
    assert batch.batch_size == len(PROMPTS)


@pytest.mark.parametrize(
    "change",
    [
        {"extend_prefix_lens_cpu": [0, 0, 1, 0, 0, 0]},
        {"extend_logprob_start_lens_cpu": [0] * 6},
        {"lora_ids": ["a", *[None] * 5]},
        {"mm_inputs": [object()] * 6},
        {"input_embeds": torch.zeros(1)},
        {"extend_input_logprob_token_ids_gpu": torch.zeros(1)},
        {"forward_mode": SimpleNamespace(name="MIXED")},
        {"capture_hidden_mode": SimpleNamespace(need_capture=lambda: True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_batches_are_left_alone(change: dict[str, Any]) -> None:
    batch = make_batch(PROMPTS)
    assert _can_share(batch)
    for name, value in change.items():
        setattr(batch, name, value)
    assert not _can_share(batch)


def test_an_engine_computes_the_prompt_of_many_samples_once(engine):
    """Compare the CPU seconds of the scheduler for samples of one prompt with those for as many prompts."""
    (scheduler,) = map(psutil.Process, engine.call("health").scheduler_pids)

    def seconds(prompts):
        before = sum(scheduler.cpu_times()[:2])
        engine.call("generate_many", requests(prompts, max_new_tokens=1))
        return sum(scheduler.cpu_times()[:2]) - before

    distinct = [[(i + j * (1 + i % 7)) % 240 for j in range(400)] for i in range(24)]
    seconds(distinct)
    assert 3 * seconds(distinct[:1] * len(distinct)) < seconds(distinct)
