"""The ops on one workload each, and what else computes the same. Shapes: t tokens, v vocabulary, h hidden size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl_kernels import (
    fp8_block_dequantize,
    fp8_block_quantize,
    linear_logprob_entropy,
    logprob_entropy_,
    segmented_reverse_scan,
)
from megarl_kernels.backend import interpreted

if TYPE_CHECKING:
    from benchmarks.kernels.sizes import Sizes

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op on one workload."""

    op: str
    """Name of the op; with the backward pass, if one is part of the measurement."""
    workload: str
    """Shapes and dtype of the inputs, as printed."""
    implementations: Mapping[str, Callable[[], Results]]
    """Name -> computation. `megarl` is the op, and `torch` is what the results are compared with."""
    min_bytes: int
    """Bytes that any implementation reads and writes: inputs and outputs, once each."""
    flops: int
    """Floating-point operations of matrix multiplications."""
    tolerance: float
    """Largest difference of results, relative to their largest magnitude."""


def make_cases(sizes: Sizes, device: str, *, compiled: bool) -> Iterator[Case]:
    """Yield a case for each op; with `compiled`, also what torch.compile makes of the PyTorch implementation."""
    torch.manual_seed(0)
    for make in (_linear_scores, _scores, _quantize, _dequantize, _scan):
        yield from make(sizes, device, compiled)


def plain_scores(logits: Tensor, targets: Tensor) -> Results:
    """Return log-probabilities and entropies [t] of float32 logits, as usually written."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def _linear_scores(sizes: Sizes, device: str, compiled: bool) -> Iterator[Case]:
    t, h, v = sizes.tokens, sizes.hidden, sizes.vocabulary
    hidden = torch.randn(t, h, device=device).to(sizes.dtype).requires_grad_()
    weight = torch.randn(v, h, device=device).mul_(h**-0.5).to(sizes.dtype).requires_grad_()
    targets = torch.randint(v, (t,), device=device)

    def op() -> Results:
        return linear_logprob_entropy(hidden, weight, targets, vocab_start=0, valid_columns=v)

    def plain() -> Results:
        return plain_scores(hidden @ weight.t(), targets)

    functions: dict[str, Callable[[], Results]] = {"megarl": op, "torch": plain}
    if compiled:
        functions["torch.compile"] = torch.compile(plain)
    size = hidden.element_size()
    inputs = (hidden.numel() + weight.numel()) * size + 8 * t
    workload = f"t {t}, h {h}, v {v}, {_name(sizes.dtype)}"
    with_backward = {name: _backward(f, (hidden, weight)) for name, f in functions.items()}
    if _has_liger(device):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        with_backward["liger, no entropy"] = _sum_backward(lambda: -loss(weight, hidden, targets), (hidden, weight))
    yield Case(
        op="linear_logprob_entropy",
        workload=workload,
        implementations={name: torch.no_grad()(f) for name, f in functions.items()},
        min_bytes=inputs + 8 * t,
        flops=2 * t * h * v,
        tolerance=_tolerance(sizes.dtype),
    )
    yield Case(
        op="linear_logprob_entropy, backward",
        workload=workload,
        implementations=with_backward,
        min_bytes=2 * inputs + 8 * t,
        flops=6 * t * h * v,
        tolerance=_tolerance(sizes.dtype),
    )


def _scores(sizes: Sizes, device: str, compiled: bool) -> Iterator[Case]:
    t, v = sizes.tokens, sizes.vocabulary
    given = torch.randn(t, v, device=device).to(sizes.dtype)
    targets = torch.randint(v, (t,), device=device)
    # the op overwrites its logits: each run copies the same logits into the same memory
    logits = given.clone().requires_grad_()

    def reset() -> Tensor:
        with torch.no_grad():
            logits.copy_(given)
        return logits

    def op() -> Results:
        return logprob_entropy_(reset(), targets, vocab_start=0, valid_columns=v)

    def plain() -> Results:
        return plain_scores(reset(), targets)

    functions: dict[str, Callable[[], Results]] = {"megarl": op, "torch": plain}
    if compiled:
        compiled_scores = torch.compile(plain_scores)
        functions["torch.compile"] = lambda: compiled_scores(reset(), targets)
    implementations = {name: _backward(f, (logits,)) for name, f in functions.items()}
    if _has_liger(device):
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss(reduction="sum")
        implementations["liger, no entropy"] = _sum_backward(lambda: -loss(reset(), targets), (logits,))
    size = given.numel() * given.element_size()
    yield Case(
        op="logprob_entropy_, backward",
        workload=f"t {t}, v {v}, {_name(sizes.dtype)}; includes a copy of the logits",
        implementations=implementations,
        # the copy reads and writes the logits, the forward pass reads them, the backward pass reads and writes them
        min_bytes=5 * size + 24 * t,
        flops=0,
        tolerance=_tolerance(sizes.dtype),
    )


def _quantize(sizes: Sizes, device: str, compiled: bool) -> Iterator[Case]:
    weight = torch.randn(sizes.rows, sizes.columns, device=device).bfloat16()
    n, k = weight.shape

    def plain() -> Results:
        padded = torch.nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128))
        blocks = padded.view(-(-n // 128), 128, -(-k // 128), 128)
        scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4)
        scales = scales / torch.full_like(scales, 448.0)  # torch divides by a number less exactly on CUDA
        values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        return values.view(padded.shape)[:n, :k], scales

    functions: dict[str, Callable[[], Results]] = {"megarl": lambda: fp8_block_quantize(weight), "torch": plain}
    if compiled:
        functions["torch.compile"] = torch.compile(plain)
    yield Case(
        op="fp8_block_quantize",
        workload=f"{n} x {k}, bfloat16",
        implementations=functions,
        min_bytes=3 * n * k + 4 * (-(-n // 128) * -(-k // 128)),
        flops=0,
        # torch.compile divides less exactly: some values are the next ones, at most 32 of 448 away
        tolerance=0.0 if not compiled else 0.072,
    )


def _dequantize(sizes: Sizes, device: str, compiled: bool) -> Iterator[Case]:
    values, scales = fp8_block_quantize(torch.randn(sizes.rows, sizes.columns, device=device).bfloat16())
    n, k = values.shape

    def plain() -> Results:
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        return ((values.float() * spread).bfloat16(),)

    functions: dict[str, Callable[[], Results]] = {
        "megarl": lambda: (fp8_block_dequantize(values, scales),),
        "torch": plain,
    }
    if compiled:
        functions["torch.compile"] = torch.compile(plain)
    yield Case(
        op="fp8_block_dequantize",
        workload=f"{n} x {k}, to bfloat16",
        implementations=functions,
        min_bytes=3 * n * k + 4 * scales.numel(),
        flops=0,
        tolerance=4e-3 if interpreted() else 0.0,  # the interpreter cuts bfloat16 off
    )


def _scan(sizes: Sizes, device: str, compiled: bool) -> Iterator[Case]:
    t = sizes.scan
    b, a = torch.randn(t, device=device), torch.full((t,), 0.95, device=device)
    a[torch.rand(t, device=device) < 1e-3] = 0.0

    def doubling() -> Results:
        x, product, step = b, a, 1
        while step < t:
            x = torch.cat([x[:-step] + product[:-step] * x[step:], x[-step:]])
            product = torch.cat([product[:-step] * product[step:], product[-step:] * 0])
            step *= 2
        return (x,)

    functions: dict[str, Callable[[], Results]] = {
        "megarl": lambda: (segmented_reverse_scan(b, a),),
        "torch": doubling,
    }
    if compiled:
        functions["torch.compile"] = torch.compile(doubling)
    yield Case(
        op="segmented_reverse_scan",
        workload=f"{t} elements, float32",
        implementations=functions,
        min_bytes=12 * t,
        flops=0,
        tolerance=1e-5,
    )


def _backward(forward: Callable[[], Results], tensors: tuple[Tensor, ...]) -> Callable[[], Results]:
    """Return a function for both passes, with gradients of log-probabilities and of a tenth of the entropies."""

    def both() -> Results:
        logprobs, entropy = forward()
        grads = torch.autograd.grad([logprobs, entropy], tensors, [-torch.ones_like(logprobs), entropy.detach() * 0.1])
        return logprobs.detach(), entropy.detach(), *grads

    return both


def _sum_backward(forward: Callable[[], Tensor], tensors: tuple[Tensor, ...]) -> Callable[[], Results]:
    """Return a function for both passes of a sum; its results are not those of the op, and are not compared."""

    def both() -> Results:
        torch.autograd.grad(forward(), tensors)
        return ()

    return both


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 3e-2


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_liger(device: str) -> bool:
    return device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
