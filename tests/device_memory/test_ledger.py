"""The ledger: peaks and ends of phases by process and owner."""

import pytest

from megarl.device_memory.ledger import DeviceLedger


def test_the_peak_of_a_phase_is_the_moment_of_its_highest_total():
    ledger = DeviceLedger()
    ledger.allocate("trainer", "parameters", 2)
    with ledger.phase("training"):
        ledger.allocate("trainer", "gradients", 4)
        ledger.allocate("trainer", "activations", 10)
        assert ledger.free("trainer", "activations") == 10
        ledger.allocate("trainer", "logits", 5)
        ledger.free("trainer", "logits")
    assert ledger.peaks["training"].by_account == {
        ("trainer", "parameters"): 2,
        ("trainer", "gradients"): 4,
        ("trainer", "activations"): 10,
    }
    assert ledger.peaks["training"].total == 16
    assert ledger.ends["training"].total == ledger.now.total == 6


def test_what_is_freed_first_does_not_count_to_the_next_phase():
    ledger = DeviceLedger()
    for _ in range(2):
        with ledger.phase("sampling"):
            ledger.allocate("engine", "kv_cache", 7)
        with ledger.phase("training"):
            ledger.free("engine", "kv_cache")
            ledger.allocate("trainer", "gradients", 4)
            ledger.free("trainer", "gradients")
    assert {name: holdings.total for name, holdings in ledger.peaks.items()} == {"sampling": 7, "training": 4}


def test_a_phase_without_allocations_has_what_is_held():
    ledger = DeviceLedger()
    ledger.allocate("trainer", "parameters", 2)
    with ledger.phase("push"):
        pass
    assert ledger.peaks["push"].total == 2


def test_an_account_is_allocated_and_freed_once():
    ledger = DeviceLedger()
    ledger.allocate("engine", "weights", 3)
    with pytest.raises(AssertionError, match="engine holds weights already"):
        ledger.allocate("engine", "weights", 3)
    ledger.free("engine", "weights")
    with pytest.raises(KeyError):
        ledger.free("engine", "weights")


def test_phases_are_not_nested():
    ledger = DeviceLedger()
    with pytest.raises(AssertionError, match="push within training"), ledger.phase("training"), ledger.phase("push"):
        pass
