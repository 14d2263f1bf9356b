"""Tests of tools that a machine may lack: skipped there, failures where the tools are required."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRE_VARIABLE = "MEGARL_REQUIRE_TEST_TOOLS"
"""Set to 1 where the machine is to have all tools, as in continuous integration."""


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test for what the machine lacks, or fail it where `REQUIRE_VARIABLE` asks for all tools."""
    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(f"{REQUIRE_VARIABLE}=1, but {reason}", pytrace=False)
    pytest.skip(reason)
