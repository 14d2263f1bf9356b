"""Rule-based rewards that are computed from the completion's text alone."""

from __future__ import annotations

import json
import re

from megarl.reward.answer_extraction import ANSWER_MARK, extract_final_answer
from megarl.reward.answers.answer_structure import (
    chosen_letter,
    is_text,
    read_base,
    read_choice,
    read_structure,
    split_unit,
    words_of,
)
from megarl.reward.answers.answer_text import clean_answer, is_too_deep
from megarl.reward.answers.quantities import read_quantities
from megarl.reward.answers.units import are_compatible
from megarl.reward.math_equivalence import CPU_SECONDS, TIMEOUT_SECONDS, Comparison, compare

MAX_ANSWER_LENGTH = 500
"""Maximum number of characters of an answer that is read; a longer one equals only the same text."""


def numeric_reward(text: str, answer: str, *, strict: bool, finished: bool) -> float:
    r"""Return 1.0 if the final answer in `text` equals the reference number, else 0.0, in microseconds.

    The final answer is the last `#### N` or `\boxed{N}`. The reference is the final answer in `answer`, or all of
    `answer` if it has none; one that is no number equals only the same text. Numbers are compared exactly (72 = 72.0 =
    \$72, 0.5 = 1/2), and their units where both have one. Arithmetic must be carried out: `#### 8+3` is not 11.

    Args:
        text: the completion.
        answer: the answer in the data, for example GSM8K's "...\n#### 72".
        strict: also require `finished`, and that `text` ends in exactly `#### <reference>`.
        finished: whether the policy ended the completion with a stop token.
    """
    reference = extract_reference(answer)
    if strict:
        return float(finished and text.endswith(f"{ANSWER_MARK} {reference}"))
    return float(compare_final_answer(text, answer) == "equal")


def math_reward(
    text: str, answer: str, *, cpu_seconds: float = CPU_SECONDS, timeout_seconds: float = TIMEOUT_SECONDS
) -> Comparison:
    """Compare the final answer in `text` with the reference in `answer`, both as in `numeric_reward`.

    Numbers and texts take microseconds; expressions, sets, intervals, tuples, matrices, equations and inequalities are
    compared with sympy, in milliseconds.

    Args:
        text: the completion.
        answer: the answer in the data.
        cpu_seconds: CPU time after which a comparison is undecided.
        timeout_seconds: wall time after which the process of sympy is taken for hung.

    Raises:
        EquivalenceError: the reference cannot be compared with itself, or the process of sympy is lost.
        RewardError: the process of sympy does not start.
    """
    compared = compare_final_answer(text, answer)
    return compared if isinstance(compared, str) else compare(*compared, cpu_seconds, timeout_seconds)


def compare_final_answer(text: str, answer: str) -> Comparison | tuple[str, str]:
    """Return the value of `math_reward` if it takes only microseconds, else what `compare_texts` returns."""
    prediction = extract_final_answer(text)
    return "unequal" if prediction is None else compare_texts(prediction, extract_reference(answer))


def compare_texts(prediction: str, reference: str) -> Comparison | tuple[str, str]:
    """Compare what needs no algebra: equal texts, numbers, words and choices.

    Returns:
        The result; or the structures of the two answers as JSON, whose comparison needs algebra.
    """
    if prediction == reference:
        return "equal"
    if max(len(prediction), len(reference)) > MAX_ANSWER_LENGTH:
        return "unequal"
    got, wanted = clean_answer(prediction), clean_answer(reference)
    if _without_spaces(got) == _without_spaces(wanted):
        return "equal"
    quantities = read_quantities(wanted, is_reference=True)
    if quantities:
        found = read_quantities(got)
        return "equal" if any(one.equals(other) for one in found for other in quantities) else "unequal"
    letter = read_choice(wanted)
    if letter is not None:
        return "equal" if chosen_letter(got) == letter else "unequal"
    if is_text(wanted):
        return "equal" if words_of(got) == words_of(wanted) else "unequal"
    if read_base(got) or read_base(wanted):
        return "equal" if read_base(got) == read_base(wanted) else "unequal"
    if not are_compatible(split_unit(got)[1], split_unit(wanted)[1]):
        return "unequal"
    if is_too_deep(got):
        return "undecided"
    return json.dumps(read_structure(got)), json.dumps(read_structure(wanted))


def _without_spaces(text: str) -> str:
    """Return a text without the spaces beside signs; those between letters and digits have a meaning."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text)


def is_number(answer: str) -> bool:
    """Whether the reference in an answer of the data is a number, as the reward `numeric` needs it."""
    reference = extract_reference(answer)
    return len(reference) <= MAX_ANSWER_LENGTH and bool(read_quantities(clean_answer(reference), is_reference=True))


def reference_structure(answer: str) -> str | None:
    """Return the structure of a reference as JSON if its comparison needs algebra, else None."""
    reference = extract_reference(answer)
    if len(reference) > MAX_ANSWER_LENGTH:
        return None
    compared = compare_texts("\\emptyset", reference)
    return None if isinstance(compared, str) else compared[1]


def extract_reference(answer: str) -> str:
    """Return the final answer in an answer of the data, or all of it if it has none."""
    return extract_final_answer(answer) or answer.strip()
