"""Deterministic inference on SGLang's CPU engine: a completion depends on its prompt and seed, not on the batch.

On CUDA, SGLang implements this with Triton kernels: batch-invariant operators, and sampling noise hashed from (seed,
position, token). This module has CPU replacements for both, which are installed in scheduler processes only.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 16
"""Matrices are padded to a multiple of this many rows. BLAS chooses its kernel by the number of rows, and kernels sum
in different orders; without padding, a row's result would depend on the batch size."""

VECTOR_MULTIPLE = 64
"""Tensors are padded to a multiple of this many elements. Elementwise kernels process full vectors and the remaining
elements by different code, in which `exp` rounds differently. Two AVX-512 vectors hold 32 numbers."""

_library: torch.library.Library | None = None


def allow_determinism_on_cpu() -> None:
    """Make SGLang accept deterministic inference with CPU attention; call before creating `sglang.Engine`.

    The engine then needs an explicit `disable_radix_cache`, because SGLang no longer sets it.
    """
    from sglang.srt.server_args import (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        add_deterministic_attention_backend_choices(["torch_native"])
    # named after the cache, but it also decides which models with latent attention are rejected
    if "torch_native" not in RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def install_cpu_kernels() -> None:
    """Replace SGLang's Triton kernels for deterministic inference in this process; no-op if CUDA is available."""
    if torch.cuda.is_available():
        return
    import sglang.srt.batch_invariant_ops as batch_invariant
    from sglang.srt.layers import sampler

    batch_invariant.enable_batch_invariant_mode = _replace_kernels
    sampler.murmur_hash32 = seeded_hash


def seeded_hash(seeds_N: Tensor, positions_N: Tensor, columns_M: Tensor) -> Tensor:
    """Return hashes of seed, position and column, int64 [N, M], uniform over [0, 2^32).

    Applies MurmurHash3's finalizer to seed, position and column in turn.
    """
    state_N = _finalize(_low_bits(seeds_N) ^ 0x9E3779B9)
    state_N = _finalize(state_N ^ _low_bits(positions_N))
    return _finalize(state_N[:, None] ^ _finalize(_low_bits(columns_M) + 1)[None])


def _low_bits(values: Tensor) -> Tensor:
    return values.to(torch.int64) & 0xFFFFFFFF


def _finalize(h: Tensor) -> Tensor:
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
            # latent attention projects queries and values with these
            _library.impl("bmm", _padded_bmm, "CPU")  # type: ignore[no-untyped-call]
            _library.impl("bmm.out", _padded_bmm_out, "CPU")  # type: ignore[no-untyped-call]
            # DeepSeek-V3 computes expert scores with it; their number depends on the batch
            _library.impl("sigmoid", _padded_sigmoid, "CPU")  # type: ignore[no-untyped-call]


def _padded_mm(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    rows, padded = a_NK.shape[0], _pad_rows(a_NK)
    out = torch.empty(padded.shape[0], b_KM.shape[1], dtype=a_NK.dtype)
    torch.mm(padded, b_KM, out=out)  # the `out` variant is a different kernel, which is not replaced
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
    """Append zero rows to a matrix [..., N, K] so that its number of rows is a multiple of `ROW_MULTIPLE`."""
    missing = -a.shape[-2] % ROW_MULTIPLE
    return F.pad(a, (0, 0, 0, missing)) if missing else a
