"""Gated delta nets of megatron-core, with its own torch functions where flash-linear-attention is not installed.

Shapes: T tokens of a pack, n sequences of a group, L its longest sequence, H heads, D width of a head, C channels, W
width of the convolution.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.megatron.modeling.torch_layers import SharedHeadNorm


def delta_net_spec() -> ModuleSpec:
    """Return the spec of a gated delta net whose linears and norm are torch's."""
    if not common.HAVE_FLA:
        _use_torch_functions()
    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    return ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**linears, out_norm=SharedHeadNorm))


def _use_torch_functions() -> None:
    """Give megatron-core torch functions in place of the kernels without which it builds no gated delta net."""
    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, gated_delta_rule


def l2norm(x: Tensor) -> Tensor:
    """Return x divided by the Euclidean norm of its last dimension, as flash-linear-attention does."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Return SiLU of the causal convolution of each channel within each sequence of a pack, and no state.

    Args:
        x: [1, T, C].
        weight: [C, W].
        cu_seqlens: int32 [S + 1].
    """
    length, width = x.shape[1], weight.shape[1]
    starts_T = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    position_T = torch.arange(length, device=x.device) - starts_T
    out = x * weight[:, -1]
    for back in range(1, min(width, length)):
        earlier = F.pad(x[:, :-back], (0, 0, back, 0)) * (position_T >= back)[:, None]
        out = out + earlier * weight[:, -1 - back]
    return F.silu(out if bias is None else out + bias), None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Apply megatron-core's torch implementation to each sequence of a pack, and return no state.

    Sequences of similar length are computed together, padded on the right: what follows a token does not change it.

    Args:
        q, k, v: [1, T, H, D].
        g, beta: [1, T, H].
        cu_seqlens: int32 [S + 1].
    """
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens.tolist()):
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    out = torch.zeros_like(v)
    for bounds in by_size.values():
        longest = max(end - start for start, end in bounds)
        starts_n1 = torch.tensor([[start] for start, _ in bounds], device=q.device)
        lengths_n1 = torch.tensor([[end - start] for start, end in bounds], device=q.device)
        at_L = torch.arange(longest, device=q.device)
        is_real_nL = at_L < lengths_n1
        index_nL = starts_n1 + torch.where(is_real_nL, at_L, 0)
        padded = (x[0, index_nL] for x in (q, k, v, g, beta))
        result_nLHD, _ = common.torch_chunk_gated_delta_rule(*padded, **options)
        out = out.index_copy(1, index_nL[is_real_nL], result_nLHD[is_real_nL][None])
    return out, None
