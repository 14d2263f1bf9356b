"""Which modules in FP8 keep their weights as they are loaded; SGLang's methods are replaced by their attributes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megarl.rollout.sglang.weight_update.repacking import _keeps_fp8_blocks


def linear(**changes):
    module = nn.Module()
    scales = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    scales.format_ue8m0 = False
    module.register_parameter("weight_scale_inv", scales)
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def method(**changes):
    plain = {"block_quant": True, "weight_block_size": [128, 128], "use_mxfp8": False}
    return SimpleNamespace(**plain | changes)


def experts(backend):
    return method(is_fp4_expert=False, get_moe_runner_backend=lambda _: backend and SimpleNamespace(value=backend))


def test_plain_blocks_are_kept():
    assert _keeps_fp8_blocks(linear(), method())
    assert _keeps_fp8_blocks(linear(_block_fp8_bf16_weight=None), method(use_marlin=False, block_fp8_as_mxfp8=False))
    for backend in (None, "triton", "deep_gemm", "cutlass"):
        assert _keeps_fp8_blocks(linear(), experts(backend))


@pytest.mark.parametrize(
    "changed",
    [
        method(block_quant=False),
        method(weight_block_size=[32, 32]),
        method(use_mxfp8=True),
        method(use_marlin=True),
        method(block_fp8_as_mxfp8=True),
        method(is_fp4_expert=True),
        experts("flashinfer_trtllm"),
        experts("marlin"),
    ],
)
def test_other_methods_repack(changed):
    assert not _keeps_fp8_blocks(linear(), changed)


def test_changed_scales_are_found():
    requantized, transposed, packed = linear(), linear(), linear()
    requantized.weight_scale_inv.format_ue8m0 = True
    transposed.weight_scale_inv.data = torch.ones(3, 2).t()
    packed.weight_scale_inv = nn.Parameter(torch.ones(2, 3, dtype=torch.int32), requires_grad=False)
    for module in (requantized, transposed, packed, nn.Module(), linear(_block_fp8_bf16_weight=torch.zeros(1))):
        assert not _keeps_fp8_blocks(module, method())
