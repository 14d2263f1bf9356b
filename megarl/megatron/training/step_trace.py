"""Traces of training steps, as PyTorch's profiler records them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megarl.megatron.requests import ProfileSpec
from megarl.megatron.runtime import platform


@contextmanager
def traced(spec: ProfileSpec | None) -> Iterator[None]:
    """Trace the block and write `<folder>/step-<step>-rank-<rank>.json.gz`, if `spec` asks this rank for it.

    The block has to wait for its kernels, as a training step does when it returns metrics; later ones are missing.
    A block that raises writes nothing.
    """
    if spec is None or dist.get_rank() not in spec.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.is_cuda() else [])]
    with profile(activities=activities) as trace:
        yield
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(f"{spec.folder}/step-{spec.step}-rank-{dist.get_rank()}.json.gz")
