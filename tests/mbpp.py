"""MBPP as published, if MEGARL_MBPP is set: the folder of mbpp.jsonl, with 974 rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PUBLISHED = Path(os.environ.get("MEGARL_MBPP", "")) / "mbpp.jsonl"

NUM_ROWS = 974

needs_published = pytest.mark.skipif(
    "MEGARL_MBPP" not in os.environ, reason="needs MEGARL_MBPP, the folder of MBPP's mbpp.jsonl"
)
