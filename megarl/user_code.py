"""Calls of code that others have written, such as rewards, environments and chat templates, and what they return.

Such code may raise anything. `SystemExit` of a reward must not end a run, and packages derive the exceptions of their
timeouts from `BaseException`.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

CallOutcome: TypeAlias = tuple[Any, BaseException | None]
"""The return value of a call, or the exception that it raised."""


def outcome_of(call: Callable[[], object]) -> CallOutcome:
    """Return what a call returns, or what it raises, whatever that is.

    Raises:
        KeyboardInterrupt: in the main thread, where Ctrl-C raises it.
    """
    try:
        return call(), None
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return None, e


async def await_outcome(call: Callable[[], Any]) -> CallOutcome:
    """Return what an async call returns, or what it raises, whatever that is.

    Raises:
        CancelledError: the task that awaits this is cancelled, as by a time limit.
    """
    try:
        return await call(), None
    except BaseException as e:
        task = asyncio.current_task()
        if isinstance(e, GeneratorExit) or (isinstance(e, asyncio.CancelledError) and task and task.cancelling()):
            raise
        return None, e


def read_number(value: object) -> float | None:
    """Return a number of any type as a float, infinity if it is beyond all floats; None if it is no real number.

    Booleans, decimals and numpy's scalars are numbers; texts, arrays and tensors are not.
    """
    number, error = outcome_of(partial(_to_float, value))
    return math.inf if isinstance(error, OverflowError) else number


def _to_float(value: Any) -> float | None:
    import numpy as np  # here, because the command line needs no numpy

    return float(value) if isinstance(value, Real | Decimal | np.bool_) else None
