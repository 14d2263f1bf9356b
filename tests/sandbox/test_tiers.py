"""The choice of a sandbox by configuration and machine."""

from __future__ import annotations

import pytest

from megarl.config.sandbox import SandboxConfig
from megarl.errors import ConfigError
from megarl.sandbox import tiers
from megarl.sandbox.local_sandbox import LocalSandbox
from megarl.sandbox.service import ServiceSandbox

NONE = {"bubblewrap": "not installed", "launcher": "forbidden", "runsc": "too old"}
KEY = "reward.terms.tests.sandbox"


@pytest.fixture
def no_tiers(monkeypatch):
    monkeypatch.setattr(tiers, "find_tier_problem", NONE.get)


def test_refuses_a_machine_without_sandboxes(no_tiers):
    with pytest.raises(ConfigError, match=rf"{KEY} .*bubblewrap: not installed; launcher: forbidden; runsc: too old"):
        tiers.choose_tier(SandboxConfig(), key=KEY)
    with pytest.raises(ConfigError, match=r"got none \(launcher: forbidden\)"):
        tiers.choose_tier(SandboxConfig(tier="launcher"), key=KEY)
    assert tiers.choose_tier(SandboxConfig(allow_unsafe=True), key=KEY) == "unsafe"


def test_prefers_a_sandbox_that_works(monkeypatch):
    monkeypatch.setattr(tiers, "find_tier_problem", {"bubblewrap": "not installed", "launcher": None}.get)
    assert tiers.choose_tier(SandboxConfig(allow_unsafe=True), key=KEY) == "launcher"
    found = tiers.open_sandbox(SandboxConfig(), key=KEY)
    assert isinstance(found, LocalSandbox)
    assert found.tier == "launcher"


def test_a_service_needs_no_machine(no_tiers):
    assert isinstance(tiers.open_sandbox(SandboxConfig(tier="service", url="http://box"), key=KEY), ServiceSandbox)
    with pytest.raises(ValueError, match="tier: service needs a url"):
        SandboxConfig(tier="service")
    with pytest.raises(ValueError, match="url needs tier: service, got tier: auto"):
        SandboxConfig(url="http://box")
