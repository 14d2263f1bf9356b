"""Rewards that need nothing but the completion's text."""

from __future__ import annotations

import re

from megarl.reward.answer_extraction import MARK, final_answer, number
from megarl.reward.math_equivalence import equivalent

LONGEST_EXPRESSION = 300
"""Characters that math-verify is asked about."""

_UNFINISHED = re.compile(r"[\w})]\s*(?:[-+*×·÷/^!]|\\(?:times|cdot|div)\b)|\\sqrt")
"""Arithmetic still to be done."""


def numeric_reward(text: str, answer: str, *, strict: bool, finished: bool) -> float:
    r"""1.0 where the final answer in `text` equals the reference, else 0.0.

    The final answer is the last `#### N` or `\boxed{N}`; the reference is the same of `answer`, or all of it. Numbers
    compare exactly (72 = 72.0 = \$72, 0.5 = 1/2), in microseconds; other expressions by math-verify, in milliseconds.
    A number must be worked out: `#### 8+3` is not 11.

    Args:
        text: the completion.
        answer: as the data has it, such as GSM8K's "...\n#### 72".
        strict: require that `finished`, and that `text` ends in exactly `#### <reference>`.
        finished: the policy ended the completion itself.
    """
    reward = quick_numeric_reward(text, answer, strict=strict, finished=finished)
    if reward is None:
        prediction = final_answer(text)
        assert prediction is not None, "the quick reward knows"
        reward = float(equivalent(prediction, _reference(answer)))
    return reward


def quick_numeric_reward(text: str, answer: str, *, strict: bool, finished: bool) -> float | None:
    """As `numeric_reward`, in microseconds always; None where math-verify has to say."""
    reference = _reference(answer)
    if strict:
        return float(finished and text.endswith(f"{MARK} {reference}"))
    prediction = final_answer(text)
    equal = False if prediction is None else _equal(prediction, reference)
    return None if equal is None else float(equal)


def format_reward(text: str, pattern: str | re.Pattern[str]) -> float:
    """1.0 where `pattern` is found in `text`, else 0.0."""
    return float(re.search(pattern, text) is not None)


def _reference(answer: str) -> str:
    return final_answer(answer) or answer.strip()


def _equal(prediction: str, reference: str) -> bool | None:
    """Whether both denote the same; None where that takes algebra."""
    if prediction == reference:
        return True
    value, wanted = number(prediction), number(reference)
    if value is not None and wanted is not None:
        return value == wanted
    if max(len(prediction), len(reference)) > LONGEST_EXPRESSION:
        return False
    if wanted is not None and (_UNFINISHED.search(prediction) or not re.search(r"\d", prediction)):
        return False
    return None
