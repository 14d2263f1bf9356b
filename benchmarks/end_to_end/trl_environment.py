"""Creates the Python environment in which TRL runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.peer_environment import make_peer_environment

REQUIREMENTS = Path(__file__).with_name("trl.txt")
"""Pinned packages; torch and transformers are those of this environment, so that both trainers use the same."""


def make_trl_environment(folder: Path, notify: Callable[[str], None]) -> Path:
    """Install TRL in `folder`, if it is not there, and return the environment's Python; raises as pip fails."""
    return make_peer_environment(folder, REQUIREMENTS, "TRL", notify)
