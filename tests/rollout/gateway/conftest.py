"""Fixtures of the gateway: a tokenizer with a chat template, and limits of time that are not reached by chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megarl.rollout.gateway import harness_agent, reply_parser
from tests.rollout.environments.chat_templates import APPEND, chat_tokenizer
from tests.time_limits import UNREACHED_SECONDS


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return chat_tokenizer(APPEND)


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness_agent, "END_SECONDS", UNREACHED_SECONDS)
        patch.setattr(reply_parser, "START_TIMEOUT_SECONDS", UNREACHED_SECONDS)
        patch.setattr(reply_parser, "TIMEOUT_SECONDS", UNREACHED_SECONDS)
        yield
