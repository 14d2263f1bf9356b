"""Lets SGLang's deterministic inference run on CPU: a completion depends on its prompt and seed, not on its neighbours.

On CUDA this is SGLang's own: batch-invariant kernels, and sampling noise hashed from (seed, position, token). Both are
Triton kernels. Their CPU twins are here, and are installed in scheduler processes only.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 16
"""BLAS picks its kernel by the number of rows, and kernels add up in different orders: a row's result must not depend
on how many rows happen to be in the batch."""

VECTOR_MULTIPLE = 64
"""Elementwise kernels compute whole vectors of a tensor one way and what is left at its end another, and `exp` rounds
differently in the two. Two vectors of AVX-512 are 32 numbers."""

_library: torch.library.Library | None = None


def allow_on_cpu() -> None:
    """Have SGLang accept deterministic inference with CPU attention; call before `sglang.Engine` is made.

    The engine needs `disable_radix_cache` from then on: SGLang no longer sets it by itself.
    """
    from sglang.srt.server_args import (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        add_deterministic_attention_backend_choices(["torch_native"])
    # named after the cache, but it also decides which models with latent attention are refused
    if "torch_native" not in RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def install_cpu_twins() -> None:
    """Replace SGLang's Triton kernels of deterministic inference in this process; nothing where CUDA is available."""
    if torch.cuda.is_available():
        return
    import sglang.srt.batch_invariant_ops as batch_invariant
    from sglang.srt.layers import sampler

    batch_invariant.enable_batch_invariant_mode = _replace_kernels
    sampler.murmur_hash32 = seeded_hash


def seeded_hash(seeds_N: Tensor, positions_N: Tensor, columns_M: Tensor) -> Tensor:
    """int64 [N, M], uniform over [0, 2^32): MurmurHash3's finaliser over seed, position and column in turn."""
    state_N = _finalise(_low_bits(seeds_N) ^ 0x9E3779B9)
    state_N = _finalise(state_N ^ _low_bits(positions_N))
    return _finalise(state_N[:, None] ^ _finalise(_low_bits(columns_M) + 1)[None])


def _low_bits(values: Tensor) -> Tensor:
    return values.to(torch.int64) & 0xFFFFFFFF


def _finalise(h: Tensor) -> Tensor:
    # products of two 32-bit numbers wrap around 64 bits, which leaves their low 32 bits right
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def _replace_kernels() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            _library.impl("mm", _padded_mm, "CPU")  # type: ignore[no-untyped-call]
            _library.impl("addmm", _padded_addmm, "CPU")  # type: ignore[no-untyped-call]
            # latent attention folds queries and unfolds values with these
            _library.impl("bmm", _padded_bmm, "CPU")  # type: ignore[no-untyped-call]
            _library.impl("bmm.out", _padded_bmm_out, "CPU")  # type: ignore[no-untyped-call]
            # DeepSeek-V3 scores experts with it; how many scores there are depends on the batch
            _library.impl("sigmoid", _padded_sigmoid, "CPU")  # type: ignore[no-untyped-call]


def _padded_mm(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    rows, padded = a_NK.shape[0], _pad_rows(a_NK)
    out = torch.empty(padded.shape[0], b_KM.shape[1], dtype=a_NK.dtype)
    torch.mm(padded, b_KM, out=out)  # the variant with `out` is another kernel, and not replaced
    return out[:rows]


def _padded_addmm(bias: Tensor, a_NK: Tensor, b_KM: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * _padded_mm(a_NK, b_KM)


def _padded_bmm(a_BNK: Tensor, b_BKM: Tensor) -> Tensor:
    rows, unused = a_BNK.shape[1], torch.empty(1, dtype=a_BNK.dtype)
    return torch.baddbmm(unused, _pad_rows(a_BNK), b_BKM, beta=0)[:, :rows]


def _padded_bmm_out(a_BNK: Tensor, b_BKM: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(_padded_bmm(a_BNK, b_BKM))


def _padded_sigmoid(x: Tensor) -> Tensor:
    padded = F.pad(x.flatten(), (0, -x.numel() % VECTOR_MULTIPLE))
    return torch.sigmoid(padded, out=torch.empty_like(padded))[: x.numel()].view(x.shape)


def _pad_rows(a: Tensor) -> Tensor:
    """[..., N, K] with zeros below, so that `ROW_MULTIPLE` divides its rows."""
    missing = -a.shape[-2] % ROW_MULTIPLE
    return F.pad(a, (0, 0, 0, missing)) if missing else a
