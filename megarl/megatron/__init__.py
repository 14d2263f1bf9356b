"""Megatron-core trainer workers: the messages that they exchange with the controller, and their worker classes."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _replace_missing_kernels() -> None:
    """Let megatron-core be imported without Triton, which one of its modules of kernels imports unconditionally.

    The kernels move activations of experts to the host (`moe_paged_stash`), which megarl refuses.
    """
    if find_spec("triton") is None:
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules[kernels.__name__] = kernels


_replace_missing_kernels()
