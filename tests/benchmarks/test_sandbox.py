"""A program in a sandbox costs little CPU time and leaves nothing behind."""

from __future__ import annotations

import pytest

from benchmarks.sandbox.measure import measure
from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers


@pytest.mark.parametrize("tier", LOCAL_TIERS)
def test_costs_of_a_sandbox(tier):
    if (reason := find_local_tiers()[tier]) is not None:
        pytest.skip(f"{tier} does not work on this machine: {reason}")
    found = measure(tier, runs=20)
    # bubblewrap starts Python and the launcher forks it; CPU time doubles where cores share what they compute with
    assert found.cpu_p50_ms <= (60 if tier == "launcher" else 120)
    assert found.cpu_p95_ms <= 200
    assert (found.processes_left, found.mounts_left, found.files_left) == (0, 0, 0)
