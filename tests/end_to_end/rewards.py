"""Reward functions: one that fails depending on the prompt's row, a cost, and one at random."""

import math
import re
import zlib
from collections.abc import Mapping

from megarl.batch.trajectory import Trajectory

EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def capricious(trajectory: Trajectory, text: str, row: Mapping[str, object]) -> float:
    """Raise on row 1, return NaN on row 2, and 1 otherwise."""
    match trajectory.prompt_id.rpartition(":")[2]:
        case "1":
            raise KeyError("no such column")
        case "2":
            return math.nan
    return 1.0


def false_equation(trajectory: Trajectory, text: str, row: Mapping[str, object]) -> float:
    """Return 1 if the text before the answer has a false equation or none, else 0."""
    found = EQUATION.findall(text.partition(" ####")[0])
    right = [int(a) + int(b) == int(c) if sign == "+" else int(a) - int(b) == int(c) for a, sign, b, c in found]
    return float(not right or not all(right))


def random(trajectory: Trajectory, text: str, row: Mapping[str, object]) -> float:
    """Return 0 or 1, independently of the quality of the answer."""
    return float(zlib.crc32(trajectory.token_ids.tobytes() + trajectory.logprobs.tobytes()) % 2)
