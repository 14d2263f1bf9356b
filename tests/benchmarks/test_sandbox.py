"""A program in a sandbox costs little CPU time and leaves nothing behind."""

from __future__ import annotations

import pytest

from benchmarks.sandbox.measure import measure
from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers


@pytest.mark.parametrize("tier", LOCAL_TIERS)
def test_costs_of_a_sandbox(tier):
    if (reason := find_local_tiers()[tier]) is not None:
        pytest.skip(f"{tier} does not work on this machine: {reason}")
    found = measure(tier, runs=10 if tier == "runsc" else 20)
    # bubblewrap starts Python, the launcher forks it, and runsc starts a kernel too; CPU time doubles where cores share
    # what they compute with
    max_p50 = {"launcher": 50, "bubblewrap": 110, "runsc": 700}[tier]
    assert found.cpu_p50_ms <= max_p50
    assert found.cpu_p95_ms <= 2 * max_p50
    assert (found.processes_left, found.mounts_left, found.files_left) == (0, 0, 0)
