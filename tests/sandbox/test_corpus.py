"""Every kind of sandbox of this machine contains every program of the corpus, which works without a sandbox."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator

import pytest

from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers
from tests.required_tools import skip_or_fail
from tests.sandbox.corpus.attacks import ATTACKS
from tests.sandbox.corpus.check import (
    EXEMPT,
    MAX_GROWTH,
    can_run_outside,
    check_tier,
    find_fault_outside,
    peak,
    reset_peak,
)
from tests.sandbox.corpus.forgeries import FORGERIES
from tests.sandbox.corpus.targets import Targets, open_targets
from tests.sandbox.local_tiers import require_tier
from tests.time_limits import HANG_SECONDS

SLOW = {"runsc": pytest.mark.slow}
"""Tiers that take more than a minute for the corpus."""


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(open_targets())
        except OSError as e:
            skip_or_fail(f"this machine lacks a place for the corpus's secret: {e}")
        yield opened


def test_corpus_is_large_enough():
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 60
    assert len(FORGERIES) >= 12


def test_a_tier_works_here():
    if None not in find_local_tiers().values():
        skip_or_fail(f"no sandbox works on this machine: {find_local_tiers()}")


@pytest.mark.parametrize("tier", [pytest.param(tier, marks=SLOW.get(tier, ())) for tier in LOCAL_TIERS])
def test_contains_all_programs_and_forgeries(tier, targets, server):
    """How long programs outlive their limits is measured by `python -m tests.sandbox.corpus`."""
    require_tier(tier)
    report = check_tier(tier, targets, server, max_overrun=HANG_SECONDS)
    assert report.failures == []
    assert len(report.contained) == len(ATTACKS) - len(EXEMPT.get(tier, {}))
    assert (report.leaks, report.refused) == (0, len(FORGERIES))


def test_growth_of_memory_is_noticed():
    """Memory that is given back before the corpus ends counts too.

    The memory is mapped: the allocator could take it from what this process has freed and still holds.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel cannot reset the peak of a process's memory: no /proc/self/clear_refs")
    before = reset_peak(os.getpid())
    with mmap.mmap(-1, MAX_GROWTH + 1) as data:
        for offset in range(0, len(data), mmap.PAGESIZE):
            data[offset] = 1
    assert peak(os.getpid()) - before > MAX_GROWTH / 2
    assert reset_peak(os.getpid()) - before < MAX_GROWTH / 2


REFUSALS = re.compile(r"the kernel refuses|(PermissionError|OSError|ConnectionRefusedError|FileNotFoundError): ")
MIN_SHARE = 0.8


def test_programs_work_without_a_sandbox(targets):
    """What reaches nothing anywhere would prove nothing; bombs and what changes the machine are left out.

    Containers and kernels refuse a few of them by themselves; on a machine that refuses more than a fifth, the corpus
    says little. A program that fails for another reason, such as a name that does not exist, is wrong everywhere.
    """
    tried = [attack for attack in ATTACKS if can_run_outside(attack)]
    faults = {attack.name: fault for attack in tried if (fault := find_fault_outside(attack, targets)) is not None}
    assert {name: fault for name, fault in faults.items() if not REFUSALS.match(fault)} == {}
    if len(faults) > (1 - MIN_SHARE) * len(tried):
        skip_or_fail(f"this machine refuses many programs without any sandbox: {faults}")
