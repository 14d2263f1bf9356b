"""What a command does with its Ray cluster at its end."""

from __future__ import annotations

import os
import sys

import pytest

from megarl.controller.ray_session import discarded_native_stderr


def test_only_what_is_written_to_stderr_within_the_block_is_discarded(capfd: pytest.CaptureFixture[str]) -> None:
    sys.stderr.write("before\n")
    with discarded_native_stderr():
        os.write(2, b"from native code\n")
    sys.stderr.write("after\n")
    os.write(2, b"and later\n")
    assert capfd.readouterr().err == "before\nafter\nand later\n"
