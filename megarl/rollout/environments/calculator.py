"""Problems that are solved with a calculator: the policy writes calls, reads results, and gives an answer."""

from __future__ import annotations

import re

from megarl.rollout.environments.environment import Step, Task, require_answers

MAX_LENGTH = 100
"""Maximum number of characters of an expression."""

MAX_NESTING = 10
"""Maximum depth of parentheses and signs."""

MAX_DIGITS = 30
"""Maximum number of digits of a result."""

_TOKEN = re.compile(r"\s*(?:(\d+)|(.))")


class ExpressionError(ValueError):
    """A text is no expression, or has no integer value."""


def compute(text: str) -> int:
    """Return the value of an expression of integers, `+ - * /` and parentheses; division needs to leave no remainder.

    Examples:
        >>> compute("2 * (3 + 4) - 8 / 4")
        12

    Raises:
        ExpressionError: the text is too long or no such expression, or its value is too large or no integer.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters, got {len(text)}")
    parser = _Parser([number or sign for number, sign in _TOKEN.findall(text.rstrip())])
    value = parser.sum()
    if parser.next is not None:
        raise ExpressionError(f"unexpected {parser.next!r}")
    return value


class _Parser:
    """Recursive descent over the tokens of an expression."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._position, self._depth = tokens, 0, 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str | None:
        token = self.next
        self._position += 1
        return token

    def sum(self) -> int:
        value = self._product()
        while self.next in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self._product())
        return value

    def _product(self) -> int:
        value = self._factor()
        while self.next in ("*", "/"):
            operator, right = self._take(), self._factor()
            if operator == "*":
                value = _bounded(value * right)
            elif right == 0:
                raise ExpressionError("division by zero")
            elif value % right:
                raise ExpressionError(f"{value} / {right} is no integer")
            else:
                value //= right
        return value

    def _factor(self) -> int:
        token = self._take()
        if token is not None and token.isdecimal():
            return _bounded(int(token))
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ExpressionError(f"nested more than {MAX_NESTING} times")
        try:
            if token == "-":  # noqa: S105 -- a sign
                return -self._factor()
            if token == "(":  # noqa: S105
                value = self.sum()
                if self._take() != ")":
                    raise ExpressionError("a parenthesis is not closed")
                return value
        finally:
            self._depth -= 1
        raise ExpressionError("unexpected end" if token is None else f"unexpected {token!r}")


def _bounded(value: int) -> int:
    if abs(value) >= 10**MAX_DIGITS:
        raise ExpressionError(f"a result has at most {MAX_DIGITS} digits")
    return value


CALL = re.compile(r"calc\(((?:[^()]|\([^()]*\))*)\)")
"""A call of the calculator; parentheses in it may be nested once."""

ANSWER = re.compile(r"####\s*(-?\d+)\s*$")
"""The answer, at the end of a reply."""


class Calculator:
    """Computes the first `calc(...)` of a reply, until a reply has none; that one needs to end in `#### <answer>`.

    The reward is 1 at the end of an episode whose answer is that of the row (`data.fields.answer`), else 0. A call that
    cannot be computed gets the reason as its result.

    Examples:
        >>> from megarl.batch.trajectory import Prompt
        >>> prompt = Prompt(prompt_id="train.jsonl:1", text="What is 6 * 7?", token_ids=(5, 6), row={}, answer="42")
        >>> environment = Calculator()
        >>> messages = [{"role": "user", "content": prompt.text}]
        >>> environment.reset(Task(prompt=prompt, messages=messages, seed=0, shared={}))
        >>> environment.step("calc(6 * 7)").messages
        [{'role': 'tool', 'content': '42'}]
        >>> environment.step("#### 42").reward
        1.0
    """

    def __init__(self, *, role: str = "tool") -> None:
        """`role`: role of the messages with results."""
        self._role = role
        self._answers: list[str] = []

    def reset(self, task: Task) -> None:
        """Begin with the messages of the row.

        Raises:
            ValueError: the row has no answer.
        """
        self._answers = [answer.strip() for answer in require_answers(task)]

    def step(self, reply: str) -> Step:
        """Return the result of a call, or the reward of an answer."""
        call = CALL.search(reply)
        if call is None:
            answer = ANSWER.search(reply)
            return Step(reward=float(answer is not None and answer.group(1) in self._answers), done=True)
        try:
            result = str(compute(call.group(1)))
        except ExpressionError as e:
            result = f"error: {e}"
        return Step(messages=[{"role": self._role, "content": result}], num_calls=1)

    def close(self) -> None:
        """Do nothing: an episode holds no resources."""
