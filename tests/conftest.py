"""One local Ray cluster for all tests that need one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

CLUSTER_SLOTS = 6

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as in a shell's background job, whose children would not be interrupted by tests either
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """This process is its driver; it ends with the session."""
    import ray

    from megarl.config.placement import PlacementConfig
    from megarl.placement.pool import start_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        # for rollout workers, which load the tests' reward functions by name
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])))
        assert start_cluster(PlacementConfig(slots_per_node=CLUSTER_SLOTS))
        yield
        ray.shutdown()
