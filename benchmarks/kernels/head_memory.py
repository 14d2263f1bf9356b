"""Measures the peak memory of a language head: forward and backward, with log-probabilities and entropies.

python -m benchmarks.kernels.head_memory --json

Runs on CUDA if there is a device. Counts the bytes that PyTorch's allocator hands out while the head runs on two
micro-batches, relative to one float32 tensor of logits [tokens, vocabulary]. The dummy gradient that autograd gets
counts; hidden states, weight and `main_grad`, which exist before, do not. `megarl check` plans `planned_over_logits_*`.

The default sizes are those of Qwen3-8B, on CPUs an eighth of each: what is relative to the logits depends on their
ratios. The least size of a chunk of a fused head is smaller with the logits, and logits are not kept, however much
memory is free. CPUs multiply bfloat16 in float32, in copies of the operands.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch

from benchmarks.kernels.measure import peak_allocated_bytes
from megarl.cluster.process.ports import find_unused_port
from megarl.config.trainer import ParallelConfig
from megarl.errors import ConfigError, MegarlError
from megarl.run.memory import training_memory
from megarl.run.memory.training_memory import HeadKind, TokenLoad, logits_bytes
from megarl_kernels import clear_dummy_gradients, linear_logprob

LOGITS = (4096, 151_936)
"""Tokens and columns of the vocabulary of a micro-batch of Qwen3-8B."""


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
    """The same for a head that computes logits in chunks of columns, and keeps none."""
    planned_over_logits_plain: float
    planned_over_logits_plain_fp32: float
    planned_over_logits_fused: float


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
    chunk_bytes = linear_logprob.CHUNK_BYTES * tokens * vocab // math.prod(LOGITS)
    linear_logprob.CHUNK_BYTES = training_memory.HEAD_CHUNK_BYTES = chunk_bytes
    linear_logprob.KEPT_FRACTION = 0.0
    peaks = {
        name: _peak_of_head(tokens, vocab, hidden, fused=fused, fp32=fp32)
        for name, fused, fp32 in (("plain", False, False), ("plain_fp32", False, True), ("fused", True, False))
    }
    logits = tokens * vocab * torch.float32.itemsize
    ratios = {f"peak_over_logits_{name}": round(peak / logits, 4) for name, peak in peaks.items()}
    kinds: dict[str, HeadKind] = {"plain": "plain", "plain_fp32": "float32", "fused": "fused"}
    ratios |= {
        f"planned_over_logits_{name}": round(_planned(tokens, vocab, hidden, kind) / logits, 4)
        for name, kind in kinds.items()
    }
    return HeadMemory(tokens=tokens, vocab=vocab, hidden=hidden, **ratios)


def _planned(tokens: int, vocab: int, hidden: int, kind: HeadKind) -> int:
    """Return the bytes planned for a bfloat16 head and its dummy gradient, without hidden states."""
    load = TokenLoad(tokens=tokens, element_bytes=torch.bfloat16.itemsize)
    dummy = 0 if kind == "float32" else vocab * hidden * torch.bfloat16.itemsize
    return logits_bytes(load, vocab, hidden, kind, trains=True) + dummy


def _peak_of_head(tokens: int, vocab: int, hidden: int, *, fused: bool, fp32: bool) -> int:
    """Return the peak in bytes of forward and backward passes in which every token is scored."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.modeling.gpt_model import HeadOptions, LanguageHead
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
        for _ in range(2):  # the second micro-batch finds the dummy gradient of the first
            scores = head.score(head(hidden_t1h)[0], target_ids_t, None)
            torch.autograd.backward(-scores.logprobs_T.mean())
            hidden_t1h.grad = head.weight.grad = None  # as in a model with megatron-core's DDP

    clear_dummy_gradients()
    return _peak_on_cuda(forward_backward) if platform.is_cuda() else peak_allocated_bytes(forward_backward)


def _peak_on_cuda(function: Callable[[], None]) -> int:
    function()  # allocates cuBLAS's workspaces, of 32 MiB for each thread that multiplies, and compiles kernels
    clear_dummy_gradients()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before


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
        measured, _, kind = name.partition("_over_logits_")
        if kind:
            print(f"  {kind:12}{measured:9}{value:8.3f} x float32 logits")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.head_memory", description=(__doc__ or "").splitlines()[0])
    divisor = 1 if torch.cuda.is_available() else 8
    parser.add_argument("--tokens", type=int, default=LOGITS[0] // divisor, help="number of scored tokens")
    parser.add_argument("--vocab", type=int, default=LOGITS[1] // divisor, help="size of the vocabulary")
    parser.add_argument("--hidden", type=int, default=4096 // divisor, help="size of the hidden states")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
