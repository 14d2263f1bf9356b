"""Limits of time of the gateway that are not reached by chance."""

from collections.abc import Iterator

import pytest

from megarl.rollout.gateway import harness_agent, reply_parser
from tests.time_limits import UNREACHED_SECONDS


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness_agent, "END_SECONDS", UNREACHED_SECONDS)
        patch.setattr(reply_parser, "START_TIMEOUT_SECONDS", UNREACHED_SECONDS)
        patch.setattr(reply_parser, "TIMEOUT_SECONDS", UNREACHED_SECONDS)
        yield
