from __future__ import annotations

import json

import pytest

from megarl.reward import math_equivalence, rules
from megarl.reward.rules import numeric_reward
from tests.gsm8k import GSM8K_FOLDERS
from tests.time_limits import UNREACHED_SECONDS


def score(text: str, answer: str, *, strict: bool = False, finished: bool = True) -> float:
    return numeric_reward(text, answer, strict=strict, finished=finished, timeout_seconds=UNREACHED_SECONDS)


@pytest.fixture
def no_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(prediction: str, reference: str, timeout_seconds: float) -> bool:
        raise AssertionError(f"math-verify was called for {prediction!r} and {reference!r}")

    monkeypatch.setattr(rules, "is_equivalent", fail)


@pytest.fixture(scope="module", params=GSM8K_FOLDERS)
def answers(request: pytest.FixtureRequest) -> list[str]:
    folder, num_rows = request.param
    answers = [json.loads(line)["answer"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(answers) == num_rows
    return answers


@pytest.mark.usefixtures("no_math_verify")
def test_every_published_answer_equals_itself(answers: list[str]) -> None:
    for strict in (False, True):
        assert all(score(answer, answer, strict=strict) == 1.0 for answer in answers)


@pytest.mark.usefixtures("no_math_verify")
def test_equivalent_spellings_of_published_answers(answers: list[str]) -> None:
    for answer in answers:
        value = int(answer.split("#### ")[1].replace(",", ""))
        for same in (f"{value:,}", f"${value}.00", f"{value}.", f"{2 * value}/2", f"{value} %"):
            assert score(f"hence #### {same}", answer) == 1.0, (same, answer)
            assert score(f"hence \\boxed{{{same}}}", answer) == 1.0, (same, answer)
        for other in (value + 1, value - 1, -value or 1, value * 10 or 10, f"{value}.5"):
            assert score(f"hence #### {other}", answer) == 0.0, (other, answer)
        assert score(f"hence {value}", answer) == 0.0
        assert score(f"#### {value}\n#### {value + 1}", answer) == 0.0


@pytest.mark.usefixtures("no_math_verify")
@pytest.mark.parametrize(
    "prediction", ["8+3", "22-11", "11*1", "8+3=11", r"11 \times 1", r"\sqrt{121}", "eleven", "", "x"]
)
def test_unevaluated_arithmetic_scores_zero(prediction: str) -> None:
    assert score(f"#### {prediction}", "11") == 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "reward"),
    [
        ("1/2", "0.5", 1.0),
        (r"\frac{2}{4}", "0.5", 1.0),
        (r"\frac{\pi}{2}", r"\pi/2", 1.0),
        ("1+x", "x+1", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
        (r"\sqrt{13}", r"\sqrt{12}", 0.0),
        ("x+2", "x+1", 0.0),
    ],
)
def test_equivalent_expressions(
    prediction: str, reference: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_equivalence, "START_TIMEOUT_SECONDS", UNREACHED_SECONDS)
    assert score(rf"so \boxed{{{prediction}}}", reference) == reward


@pytest.mark.usefixtures("no_math_verify")
def test_long_expressions_skip_math_verify() -> None:
    assert score("#### " + "x+" * 500, "y") == 0.0


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [
        ("8+3=11;11-2=9 #### 9", True, 1.0),
        ("8+3=11;11-2=9 #### 9", False, 0.0),
        ("#### 9\n", True, 0.0),
        ("#### 9.", True, 0.0),
        ("#### 9.0", True, 0.0),
        ("#### 19", True, 0.0),
        ("####9", True, 0.0),
        ("9", True, 0.0),
        ("#### 9 #### 8", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_strict(text: str, finished: bool, reward: float) -> None:
    assert score(text, "9", strict=True, finished=finished) == reward


def test_only_strict_requires_a_finished_completion() -> None:
    assert score("#### 9", "9", finished=False) == 1.0
