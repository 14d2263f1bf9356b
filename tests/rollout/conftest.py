"""Fixtures of the engines' tests that those of rollout workers need, too."""

from tests.engines.conftest import tokenizer

__all__ = ["tokenizer"]
