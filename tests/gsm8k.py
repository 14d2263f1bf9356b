"""Folders with GSM8K's train.jsonl: rows written for these tests, and the published set if MEGARL_GSM8K is set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OWN_ROWS = Path(__file__).parent / "data/gsm8k_style"
"""Twelve rows in the format of GSM8K: results between << and >>, answers after ####, some with thousands separators."""

PUBLISHED = Path(os.environ.get("MEGARL_GSM8K", ""))

needs_published = pytest.mark.skipif(
    "MEGARL_GSM8K" not in os.environ, reason="needs MEGARL_GSM8K, the folder of GSM8K's train.jsonl"
)
GSM8K_FOLDERS = [
    pytest.param((OWN_ROWS, 12), id="own rows"),
    pytest.param((PUBLISHED, 7473), id="published", marks=needs_published),
]
"""Test parameters: the folder of a `train.jsonl`, and its number of rows."""
