"""Tests of the parser for Slurm time limits."""

from __future__ import annotations

import pytest

from megarl.errors import ConfigError
from megarl.launch.slurm_time_limit import parse_time_limit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 86400 + 9000),
        ("2-03:04:05", 2 * 86400 + 3 * 3600 + 4 * 60 + 5),
    ],
)
def test_all_forms_of_the_manual(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "1-", "-5", "1-2:", "12:00:", "1.5", " 5", "1-2:3:4:5"])
def test_other_forms_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time: needs minutes, .*, got '.*'$"):
        parse_time_limit(text)
    with pytest.raises(ConfigError, match=r"^--time: needs a limit above zero, got '0:00'$"):
        parse_time_limit("0:00")
