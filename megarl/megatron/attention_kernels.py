"""Chooses the attention kernels of Transformer Engine's layers: cuDNN's or flash-attn's, for packed sequences.

Transformer Engine falls back silently to kernels that store all attention scores, quadratic in the length of a
sequence. megarl never allows that, and reports at the start of a run what a GPU lacks. What Transformer Engine 2.20
has for training in bfloat16 with packs (`thd`), with context parallelism unless the table excludes it:

    backend   kernels        compute capability        sizes of the heads of keys and values
    fused     cuDNN          9.0 and later             multiples of 8 up to 128; 192 and 128 (MLA); on 9.0 up to 256
    flash     flash-attn 2   8.0 and later             multiples of 8 up to 256; on 8.6 and 8.9 up to 192
    flash     flash-attn 3   9.0                       the same
    flash     flash-attn 4   9.0 and later, cp = 1     the same

Imports neither torch nor megatron-core, because `megarl check` and `megarl doctor` do without them.
"""

from __future__ import annotations

import re
from typing import Literal

from megarl.cluster.placement.hardware import BLACKWELL, HOPPER, Capability, package_version
from megarl.config.megatron import MegatronConfig
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention, LatentAttention

KEY = "trainer.megatron.model.attention_backend"
USE_TORCH_LAYERS = "set trainer.megatron.model.transformer_impl: local, for torch's layers"

FLASH_ATTN_PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
"""Package by generation of flash-attn."""

FIRST_FLASH_ATTN_2, END_FLASH_ATTN_2 = (2, 1, 1), (2, 8, 4)
"""Transformer Engine uses flash-attn 2 from the first version on, and below the second."""

FIRST_FLASH_ATTN_2_ON_BLACKWELL = (2, 7, 3)


def attention_backend(megatron: MegatronConfig, capability: Capability) -> Literal["flash", "fused"]:
    """Return megatron-core's `attention_backend` on a GPU: the configured one, by default cuDNN where it can."""
    configured = megatron.model.get("attention_backend", "auto")
    if configured == "auto":
        return "fused" if capability >= HOPPER else "flash"
    return "flash" if configured == "flash" else "fused"


def find_attention_problem(
    architecture: ModelArchitecture, megatron: MegatronConfig, capability: Capability, *, cp: int
) -> str | None:
    """Return what Transformer Engine's layers lack on a GPU for their attention, and the remedies; None if nothing.

    Args:
        capability: compute capability of the GPU.
        cp: context-parallel size.
    """
    if attention_backend(megatron, capability) == "flash":
        return find_flash_attn_problem(megatron, capability, cp=cp) or _find_flash_size_problem(
            architecture, capability
        )
    gpu = _name(capability)
    if capability < HOPPER:
        return (
            f"{KEY}: fused needs compute capability 9.0 for packed sequences, got {gpu}; set flash, which needs "
            f"flash-attn 2, or {USE_TORCH_LAYERS}"
        )
    for keys, values in _head_sizes(architecture):
        fits = max(keys, values) <= 128 or (keys, values) == (192, 128)
        # cuDNN's kernels for wide heads of Hopper exclude MLA's other sizes
        fits |= capability == HOPPER and max(keys, values) <= 256 and (keys == values or min(keys, values) < 128)
        if not fits or keys % 8 or values % 8:
            return (
                f"{KEY}: fused has no kernel for heads of {keys} (keys) and {values} (values) on compute capability "
                f"{gpu}; set flash, which needs flash-attn, or {USE_TORCH_LAYERS}"
            )
    return None


def find_flash_attn_problem(megatron: MegatronConfig, capability: Capability, *, cp: int) -> str | None:
    """Return why no flash-attn is installed that Transformer Engine can use on a GPU, and the remedies; else None."""
    generations = [2, *([3] if capability == HOPPER else []), *([4] if capability >= HOPPER and cp == 1 else [])]
    pinned = megatron.model.get("flash_attention_version")
    usable = [each for each in generations if pinned in (None, each)]
    first = FIRST_FLASH_ATTN_2 if capability < BLACKWELL else FIRST_FLASH_ATTN_2_ON_BLACKWELL
    found = {each: package_version(FLASH_ATTN_PACKAGES[each]) for each in usable}
    if any(version and (each > 2 or first <= _numbers(version) < END_FLASH_ATTN_2) for each, version in found.items()):
        return None
    wanted = [f"flash-attn 2 ({_dotted(first)} or later, before {_dotted(END_FLASH_ATTN_2)})" if each == 2 else
              f"flash-attn {each}" for each in usable]  # fmt: skip
    with_cp = f" with context parallelism of {cp}" if cp > 1 else ""
    if not usable:
        return (
            f"trainer.megatron.model.flash_attention_version: {pinned} has no kernels on compute capability "
            f"{_name(capability)}{with_cp}, which has {' and '.join(map(str, generations))}"
        )
    lacking = f"got {found[2]}" if found.get(2) else "which is not installed"
    return (
        f"{KEY}: on compute capability {_name(capability)}{with_cp} flash needs {' or '.join(wanted)}, {lacking}; "
        f"install it, or {USE_TORCH_LAYERS}"
    )


def _find_flash_size_problem(architecture: ModelArchitecture, capability: Capability) -> str | None:
    largest = max(max(sizes) for sizes in _head_sizes(architecture))  # narrower values are padded
    if largest % 8 == 0 and largest <= (192 if capability in ((8, 6), (8, 9)) else 256):
        return None
    return f"{KEY}: flash has no kernel for heads of {largest} on compute capability {_name(capability)}; " + (
        USE_TORCH_LAYERS
    )


def _head_sizes(architecture: ModelArchitecture) -> set[tuple[int, int]]:
    """Return the distinct sizes of a head's keys and values."""
    grouped = {(a.head_dim, a.head_dim) for a in architecture.attentions(GroupedQueryAttention)}
    latent = architecture.attentions(LatentAttention)
    return grouped | {(a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim) for a in latent}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _name(capability: Capability) -> str:
    return _dotted(capability)
