"""Expectations of errors that leave their sentences free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def expect_error[E: BaseException](error: type[E], *parts: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error whose message has these parts: the keys, values and names that a user needs.

    The words around them are not compared, so that a sentence can be improved without its tests.
    """
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
