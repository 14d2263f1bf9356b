"""Ray clusters of this machine for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from megarl.cluster.placement.pool import node_start

START_SECONDS = 300.0
"""Time limit for the start of a cluster."""


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Run the block as the driver of a new cluster; `options`: of `ray.init`.

    Raises:
        WorkerError: the cluster did not start.
    """
    with node_start(START_SECONDS, "limit of benchmarks"):
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
    try:
        yield
    finally:
        ray.shutdown()
