"""Rule-based rewards that are computed from the completion's text alone."""

from __future__ import annotations

import re

from megarl.reward.answer_extraction import ANSWER_MARK, extract_final_answer, parse_number
from megarl.reward.math_equivalence import TIMEOUT_SECONDS, is_equivalent

MAX_EXPRESSION_LENGTH = 300
"""Maximum number of characters of an expression that is checked with math-verify."""

_UNFINISHED = re.compile(r"[\w})]\s*(?:[-+*×·÷/^!]|\\(?:times|cdot|div)\b)|\\sqrt")
"""Matches arithmetic that the policy has not carried out."""


def numeric_reward(
    text: str, answer: str, *, strict: bool, finished: bool, timeout_seconds: float = TIMEOUT_SECONDS
) -> float:
    r"""Return 1.0 if the final answer in `text` equals the reference, else 0.0.

    The final answer is the last `#### N` or `\boxed{N}`. The reference is the final answer in `answer`, or all of
    `answer` if it has none. Numbers are compared exactly (72 = 72.0 = \$72, 0.5 = 1/2), in microseconds; other
    expressions with math-verify, in milliseconds. Arithmetic must be carried out: `#### 8+3` is not 11.

    Args:
        text: the completion.
        answer: the answer in the data, for example GSM8K's "...\n#### 72".
        strict: also require `finished`, and that `text` ends in exactly `#### <reference>`.
        finished: whether the policy ended the completion with a stop token.
        timeout_seconds: timeout of math-verify.

    Raises:
        EquivalenceError: math-verify did not reply.
        RewardError: math-verify does not start.
    """
    reward = fast_numeric_reward(text, answer, strict=strict, finished=finished)
    if reward is None:
        prediction = extract_final_answer(text)
        assert prediction is not None, "fast_numeric_reward handles a missing answer"
        reward = float(is_equivalent(prediction, _extract_reference(answer), timeout_seconds))
    return reward


def fast_numeric_reward(text: str, answer: str, *, strict: bool, finished: bool) -> float | None:
    """Return the value of `numeric_reward` if it needs only microseconds, or None if it needs math-verify."""
    reference = _extract_reference(answer)
    if strict:
        return float(finished and text.endswith(f"{ANSWER_MARK} {reference}"))
    prediction = extract_final_answer(text)
    equal = False if prediction is None else _are_equal(prediction, reference)
    return None if equal is None else float(equal)


def _extract_reference(answer: str) -> str:
    return extract_final_answer(answer) or answer.strip()


def _are_equal(prediction: str, reference: str) -> bool | None:
    """Whether both answers are equal; None if that requires algebra."""
    if prediction == reference:
        return True
    value, wanted = parse_number(prediction), parse_number(reference)
    if value is not None and wanted is not None:
        return value == wanted
    if max(len(prediction), len(reference)) > MAX_EXPRESSION_LENGTH:
        return False
    if wanted is not None and (_UNFINISHED.search(prediction) or not re.search(r"\d", prediction)):
        return False
    return None
