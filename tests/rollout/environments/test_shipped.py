"""The environments that ship: expressions against Python's own arithmetic, answers, hints and rewards."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megarl.batch.trajectory import Prompt
from megarl.rollout.environments.calculator import Calculator
from megarl.rollout.environments.environment import Step, Task
from megarl.rollout.environments.expressions import ExpressionError, compute
from megarl.rollout.environments.guess import Guess


def random_expression(rng: random.Random, depth: int = 0) -> str:
    if depth == 4 or rng.random() < 0.3:
        return str(rng.randint(0, 99))
    left, right = (random_expression(rng, depth + 1) for _ in range(2))
    text = f"{left}{rng.choice([' ', ''])}{rng.choice('+-*/')}{right}"
    return rng.choice([text, f"({text})", f"-({text})"])


def test_expressions_have_the_values_that_python_gives_them() -> None:
    rng, num_values = random.Random(0), 0
    for _ in range(3000):
        text = random_expression(rng)
        try:
            exact = eval(text.replace("/", "//"))
            remainder = eval(text)
        except ZeroDivisionError:
            exact = remainder = None
        try:
            got = compute(text)
        except ExpressionError:
            continue
        num_values += 1
        assert exact is not None
        assert got == exact == pytest.approx(remainder)
    assert num_values > 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unexpected end"),
        ("2+", "unexpected end"),
        ("2 3", "unexpected '3'"),
        ("2**3", r"unexpected '\*'"),
        ("abs(2)", "unexpected 'a'"),
        ("(2", "not closed"),
        ("1/0", "division by zero"),
        ("7/2", "7 / 2 is no integer"),
        ("9" * 31, "at most 30 digits"),
        ("9" * 20 + "*" + "9" * 20, "at most 30 digits"),
        ("1+" * 60 + "1", "at most 100 characters, got 121"),
        ("(" * 20 + "1" + ")" * 20, "nested more than 10 times"),
        ("-" * 99 + "1", "nested more than 10 times"),
    ],
)
def test_other_texts_have_no_value(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        compute(text)


def begin(environment: Any, answer: str | None) -> Any:
    prompt = Prompt(prompt_id="d.jsonl:1", text="", token_ids=(1,), row={}, answer=answer)
    environment.reset(Task(prompt=prompt, messages=[], seed=0, shared={}))
    return environment


def test_the_calculator_answers_calls_and_rewards_the_answer() -> None:
    calculator = begin(Calculator(), "777")
    assert calculator.step("calc(7 * (100 + 11))") == Step(messages=[{"role": "tool", "content": "777"}], num_calls=1)
    assert calculator.step("calc(7 +)").messages == [{"role": "tool", "content": "error: unexpected end"}]
    assert calculator.step("so it is #### 777\n") == Step(reward=1.0, done=True)
    assert begin(Calculator(), "777").step("#### 77") == Step(reward=0.0, done=True)
    assert begin(Calculator(), "777").step("777") == Step(reward=0.0, done=True)
    assert begin(Calculator(), "-5").step("#### -5").reward == 1.0
    with pytest.raises(ValueError, match=r"d.jsonl:1 has no answer"):
        begin(Calculator(), None)


def test_the_game_gives_hints_and_its_reward_at_the_end() -> None:
    game = begin(Guess(max_guesses=3), "5")
    assert game.step("3") == Step(messages=[{"role": "user", "content": "higher"}])
    assert game.step("I guess 6.") == Step(messages=[{"role": "user", "content": "lower"}])
    assert game.step("5") == Step(reward=1.0, done=True)
    lost = begin(Guess(max_guesses=1), "5")
    assert lost.step("4") == Step(reward=0.0, done=True)
    assert begin(Guess(), "5").step("no idea") == Step(reward=0.0, done=True)
    with pytest.raises(ValueError, match="needs an integer as its answer, got 'five'"):
        begin(Guess(), "five")
