"""Matrices of test cases of which a sample runs by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Return parameters of all cases, of which those that are not in `default` are marked as slow."""
    every, chosen = list(cases), list(default)
    assert all(case in every for case in chosen), [case for case in chosen if case not in every]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in every
    ]
