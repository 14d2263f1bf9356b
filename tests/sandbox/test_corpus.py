"""Every kind of sandbox of this machine contains every program of the corpus, which works without a sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megarl.sandbox.fork_server_client import ForkServer
from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers
from tests.sandbox.corpus.check import ATTACKS, can_run_outside, check_tier, find_fault_outside
from tests.sandbox.corpus.forgeries import FORGERIES
from tests.sandbox.corpus.targets import Targets, open_targets


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with open_targets() as opened:
        yield opened


def test_corpus_is_large_enough():
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 60
    assert len(FORGERIES) >= 12


def test_a_tier_works_here():
    """A machine without any sandbox tests nothing."""
    assert None in find_local_tiers().values(), find_local_tiers()


@pytest.mark.parametrize("tier", LOCAL_TIERS)
def test_contains_all_programs_and_forgeries(tier, targets):
    if (reason := find_local_tiers()[tier]) is not None:
        pytest.skip(f"{tier} does not work on this machine: {reason}")
    server = ForkServer()
    try:
        report = check_tier(tier, targets, server)
    finally:
        server.close()
    assert report.failures == []
    assert len(report.contained) == len(ATTACKS)


REFUSALS = re.compile(r"the kernel refuses|(PermissionError|OSError|ConnectionRefusedError|FileNotFoundError): ")
MIN_SHARE = 0.8


def test_programs_work_without_a_sandbox(targets):
    """What reaches nothing anywhere would prove nothing; bombs and what changes the machine are left out.

    Containers and kernels refuse a few of them by themselves; on a machine that refuses more than a fifth, the corpus
    says little. A program that fails for another reason, such as a name that does not exist, is wrong everywhere.
    """
    tried = [attack for attack in ATTACKS if can_run_outside(attack)]
    faults = {attack.name: fault for attack in tried if (fault := find_fault_outside(attack, targets)) is not None}
    assert len(tried) >= 35
    assert {name: fault for name, fault in faults.items() if not REFUSALS.match(fault)} == {}
    assert len(faults) <= (1 - MIN_SHARE) * len(tried), faults
