"""The tool of the agents: it computes `a*b-c`, and evaluates no code."""

import re

PROBLEM = re.compile(r"(\d{1,9})\*(\d{1,9})-(\d{1,9})")


def compute(expression: str) -> str:
    """Return the value of `a*b-c` as text, or what is wrong with the expression."""
    found = PROBLEM.fullmatch(expression.replace(" ", ""))
    if found is None:
        return "error: write a*b-c"
    a, b, c = map(int, found.groups())
    return str(a * b - c)
