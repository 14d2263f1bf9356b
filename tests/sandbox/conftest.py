"""Fixtures: a fork server, and limits of time that are not reached by chance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.sandbox.session import ForkServer
from tests.sandbox.local_tiers import patience


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with patience():
        yield


@pytest.fixture(scope="module")
def server(_patience: None) -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()
