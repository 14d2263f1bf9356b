"""Sandboxes of this machine for tests: which there are, and limits of time that no test meets by accident."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megarl.sandbox import session, tiers
from megarl.sandbox.guest.channel import Limits
from tests.required_tools import skip_or_fail
from tests.time_limits import UNREACHED_SECONDS

PATIENT = {"wall_seconds": UNREACHED_SECONDS, "cpu_seconds": int(UNREACHED_SECONDS)}
"""Limits of a program that ends by itself."""

HOST_LIMITS = {
    tiers: ("GRACE_SECONDS", "SEND_SECONDS"),
    session: ("CLOSE_SECONDS", "START_SECONDS"),
}


def patient_limits(**limits: Any) -> Limits:
    """Return limits; those of time that are not given are longer than any test takes."""
    return Limits(**PATIENT | limits)


@contextmanager
def patience() -> Iterator[None]:
    """Let the host wait for sandboxes as long as tests do, and the programs that look for tiers too."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in HOST_LIMITS.items():
            for name in names:
                patch.setattr(module, name, UNREACHED_SECONDS)
        patch.setattr(tiers, "Limits", patient_limits)
        yield


def require_tier(tier: str) -> None:
    """Skip the test where a tier does not work on this machine; all but runsc can be required (`skip_or_fail`)."""
    reason = None if tier == "unsafe" else tiers.find_tier_problem(tier)
    if reason is not None:
        text = f"the sandbox {tier} does not work on this machine: {reason}"
        if tier == "runsc":
            pytest.skip(text)
        skip_or_fail(text)


def best_tier() -> str:
    """Return the preferred tier of this machine; `unsafe` if there is none."""
    return next((tier for tier in tiers.LOCAL_TIERS if tiers.find_tier_problem(tier) is None), "unsafe")
