"""Calls of the user's code, whatever they raise, and the numbers that they return."""

from __future__ import annotations

import asyncio
import math
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from megarl.text import text_of
from megarl.user_code import await_outcome, outcome_of, read_number


class Failure(BaseException):
    pass


class Hostile(float):
    def __float__(self) -> float:
        raise Failure

    def __repr__(self) -> str:
        raise Failure

    @property
    def ndim(self) -> int:
        raise Failure


def fail(error: BaseException) -> None:
    raise error


ERRORS = [ValueError("x"), SystemExit(3), Failure(), GeneratorExit(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_call_raises_is_its_outcome(error: BaseException) -> None:
    assert outcome_of(lambda: fail(error)) == (None, error)
    assert outcome_of(lambda: 5) == (5, None)


def test_ctrl_c_ends_a_call_in_the_main_thread_only() -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome_of(lambda: fail(KeyboardInterrupt()))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(outcome_of(lambda: fail(KeyboardInterrupt()))))
    thread.start()
    thread.join()
    assert isinstance(found[0][1], KeyboardInterrupt)


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), Failure(), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_whatever_an_async_call_raises_is_its_outcome(error: BaseException) -> None:
    async def call() -> None:
        await asyncio.sleep(0)
        raise error

    assert asyncio.run(await_outcome(call)) == (None, error)


def test_a_time_limit_cancels_an_async_call() -> None:
    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(await_outcome(asyncio.get_running_loop().create_future), 0.01)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0), (True, 1.0), (np.bool_(False), 0.0), (np.float16(0.5), 0.5), (np.int8(-3), -3.0),
        (np.longdouble(2), 2.0), (np.array(5.0), None), (torch.tensor(2.5), None),
        (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25), (10**400, math.inf), (Fraction(10**400), math.inf),
        (Decimal("1e999"), math.inf), (-math.inf, -math.inf), ("1.0", None), (None, None), (1j, None), (b"1", None),
        (np.array([1.0]), None), (torch.tensor([1.0]), None), (np.str_("1"), None), (np.datetime64("2024-01-01"), None),
        (Decimal("sNaN"), None), ([1.0], None),
    ],
)  # fmt: skip
def test_numbers_of_any_type_are_read(value: object, number: float | None) -> None:
    assert read_number(value) == number


def test_nan_is_a_number() -> None:
    found = read_number(np.float32("nan"))
    assert found is not None
    assert math.isnan(found)


def test_values_whose_methods_raise_are_neither_numbers_nor_texts() -> None:
    assert read_number(Hostile(1.0)) is None
    assert text_of(Hostile(1.0)) == "<Hostile without text: Failure>"
