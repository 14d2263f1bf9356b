"""Measures the peak memory of a language head: forward and backward, with log-probabilities and entropies.

python -m benchmarks.kernels.head_memory --json

Runs on CUDA if there is a device. Counts the bytes that PyTorch's allocator hands out while the head runs, relative to
one float32 tensor of logits [tokens, vocabulary]. Hidden states, weight and `main_grad` exist before, and do not count.
On a CPU, a fused head computes with the PyTorch reference of its kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch

from megarl.config.trainer import ParallelConfig
from megarl.errors import ConfigError, MegarlError
from megarl.process.ports import find_unused_port


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMemory:
    """Peak memory of a head whose weight and hidden states are bfloat16."""

    tokens: int
    vocab: int
    hidden: int
    peak_over_logits_plain: float
    """Peak / bytes of float32 logits, for a head that makes logits in bfloat16."""
    peak_over_logits_plain_fp32: float
    """The same for a head that makes logits in float32 (`model.fp32_lm_head`)."""
    peak_over_logits_fused: float
    """The same for a head that keeps no logits."""


def measure_head_memory(tokens: int, vocab: int, hidden: int) -> HeadMemory:
    """Measure all heads in this process, which becomes the only rank of a process group."""
    from megarl.megatron.runtime import parallel_state, platform

    platform.prepare()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_unused_port()),
    }
    state = parallel_state.init_parallel_state(ParallelConfig(), seed=0, timeout=timedelta(minutes=1))
    state.activate()
    peaks = {
        name: _peak_of_head(tokens, vocab, hidden, fused=fused, fp32=fp32)
        for name, fused, fp32 in (("plain", False, False), ("plain_fp32", False, True), ("fused", True, False))
    }
    logits = tokens * vocab * torch.float32.itemsize
    ratios = {f"peak_over_logits_{name}": round(peak / logits, 4) for name, peak in peaks.items()}
    return HeadMemory(tokens=tokens, vocab=vocab, hidden=hidden, **ratios)


def _peak_of_head(tokens: int, vocab: int, hidden: int, *, fused: bool, fp32: bool) -> int:
    """Return the peak in bytes of one forward and backward pass in which every token is scored."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.modeling.language_head import HeadOptions, LanguageHead
    from megarl.megatron.runtime import platform

    device = platform.device()
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, params_dtype=torch.bfloat16, bf16=True
    )
    layer = ColumnParallelLinear(
        hidden,
        vocab,
        config=config,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=hidden**-0.5),
        bias=False,
        tp_group=get_tensor_model_parallel_group(),
    )
    options = HeadOptions(temperature=1.0, fused=fused, fp32=fp32)
    head = LanguageHead(layer, options, vocab_size=vocab, softcap=None)
    head.weight.main_grad = torch.zeros(vocab, hidden, device=device)
    head.weight.grad_added_to_main_grad = False
    hidden_t1h = torch.randn(tokens, 1, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    target_ids_t = torch.randint(vocab, (tokens,), device=device)

    def forward_backward() -> None:
        scores = head.score(head(hidden_t1h)[0], target_ids_t, None)
        scores.entropy_T.detach().mean()
        torch.autograd.backward(-scores.logprobs_T.mean())

    return _peak_on_cuda(forward_backward) if platform.is_cuda() else peak_allocated_bytes(forward_backward)


def _peak_on_cuda(function: Callable[[], None]) -> int:
    function()  # allocates cuBLAS's workspaces, of 32 MiB for each thread that multiplies, and compiles kernels
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before


def peak_allocated_bytes(function: Callable[[], None]) -> int:
    """Return the largest sum in bytes of what `function` has allocated and not yet freed on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def main() -> int:
    """Print the measurements to stdout."""
    args = _parser().parse_args()
    sizes = {name: getattr(args, name) for name in ("tokens", "vocab", "hidden")}
    try:
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"--{name} needs at least 1, got {size}")
        memory = measure_head_memory(**sizes)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(asdict(memory)))
        return 0
    print(f"peak memory of a bfloat16 head, {args.tokens} tokens x {args.vocab} columns, hidden size {args.hidden}")
    for name, value in asdict(memory).items():
        if name.startswith("peak_over_logits_"):
            print(f"  {name.removeprefix('peak_over_logits_'):12}{value:8.3f} x float32 logits")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.head_memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="number of scored tokens")
    parser.add_argument("--vocab", type=int, default=32_768, help="size of the vocabulary")
    parser.add_argument("--hidden", type=int, default=256, help="size of the hidden states")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
