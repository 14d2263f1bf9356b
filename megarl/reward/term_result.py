"""Reads what a reward of the user returns for one completion: a function of his, or a service."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.batch.trajectory import MAX_REWARD
from megarl.config.reward import TERM_METRICS
from megarl.reward.terms import TermError, TermValue, abbreviate
from megarl.text import replace_surrogates
from megarl.user_code import read_number

REWARD_KEY = "reward"
"""Key of the reward in a mapping; all other keys are only logged."""


def read_result(label: str, result: object, where: str) -> TermValue | TermError:
    """Return the value of one completion: a finite number, or a mapping of such numbers with the key `reward`.

    Args:
        label: name of the term, for error messages.
        where: the completion, for error messages.
    """
    if not isinstance(result, Mapping):
        return _read_numbers(label, {REWARD_KEY: result}, where)
    keys = abbreviate(list(result))
    if REWARD_KEY not in result:
        return TermError(f"{label} returned a mapping without the key {REWARD_KEY!r}, but {keys}, {where}")
    if not all(isinstance(name, str) and name not in TERM_METRICS for name in result):
        what = f"needs to return a mapping whose keys are strings other than {', '.join(TERM_METRICS)}"
        return TermError(f"{label} {what}, got {keys}, {where}")
    return _read_numbers(label, result, where)


def _read_numbers(label: str, result: Mapping[str, object], where: str) -> TermValue | TermError:
    found: dict[str, float] = {}
    for name, value in result.items():
        at = "" if name == REWARD_KEY else f" for {abbreviate(name)}"
        number = read_number(value)
        if number is None:
            got = f"{type(value).__name__} {abbreviate(value)}{at}"
            return TermError(f"{label} returned {got}, not a number, {where}")
        if not math.isfinite(number):
            return TermError(f"{label} returned {abbreviate(value)}{at}, not a finite number, {where}")
        if name == REWARD_KEY and abs(number) > MAX_REWARD:
            return TermError(f"{label} returned {abbreviate(value)}, a reward beyond {MAX_REWARD:g}, {where}")
        found[replace_surrogates(name)] = number
    return TermValue(found.pop(REWARD_KEY), found)
