"""Word problems that a model with 0.5M parameters learns within a minute of CPU time.

    Mia has 8 pens. Mia gets 3 more and sells 2. How many pens?
    8+3=11;11-2=9 #### 9

Most demonstrations of two-step problems stop after step one. A fine-tuned model therefore knows both behaviors and
usually stops early; only reinforcement learning teaches it which one is right.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import DataError

NAMES = ("Ada", "Ben", "Eve", "Leo", "Mia", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "pens", "stones")
GAINS = ("buys {} more", "finds {} more", "gets {} more")
LOSSES = ("gives away {}", "loses {}", "sells {}")

MAX_START = 9
MAX_CHANGE = 6
"""With larger numbers, addition becomes the bottleneck and early stopping no longer dominates."""

ONE_STEP_SHARE = 0.3
EARLY_STOP_SHARE = 0.6
"""Fraction of the demonstrations of two-step problems that stop after step one."""

PAIRS_PER_PROBLEM = 4
"""Rejected answers sampled for each training problem; duplicates are dropped."""

NO_ANSWER_SHARE = {1: 0.6, 2: 0.2}
"""Number of steps -> fraction of the rejected answers that end before stating an answer."""

REJECTED_EARLY_STOP_SHARE = 0.7
"""Fraction of the other rejected answers to two-step problems that stop after step one, as a policy would."""

MAX_ERROR = 3
"""Maximum absolute error in the counts of a rejected answer."""

HELDOUT_ONE_IN = 5
"""One in this many problems is held out."""

MAX_REPEATS = 100_000
"""Consecutive samples without a new problem after which generation fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticProblem:
    """A word problem with one or two steps."""

    start: int
    changes: tuple[int, ...]
    """Change of the count in each step; negative for losses."""
    name: str
    thing: str
    actions: tuple[str, ...]
    """Changes in words, one per step."""

    @property
    def values(self) -> tuple[int, ...]:
        """Counts at the start and after each step."""
        values = [self.start]
        for change in self.changes:
            values.append(values[-1] + change)
        return tuple(values)

    @property
    def prompt(self) -> str:
        """Problem text, ending with a newline after which the policy continues."""
        return (
            f"{self.name} has {self.start} {self.thing}. {self.name} {' and '.join(self.actions)}. "
            f"How many {self.thing}?\n"
        )

    @property
    def answer(self) -> str:
        """Final count as text."""
        return str(self.values[-1])

    @property
    def solution(self) -> str:
        """All steps and the right answer."""
        return self.partial_solution(len(self.changes))

    def partial_solution(self, num_steps: int) -> str:
        """Return the first `num_steps` steps, with the count after them as the answer."""
        return f"{self.format_steps(num_steps)} #### {self.values[num_steps]}"

    def format_steps(self, num_steps: int, *, error_at: int | None = None, error: int = 0) -> str:
        """Return the first `num_steps` steps as text; from step `error_at` on, every count is too high by `error`."""
        values = [v + error * (error_at is not None and i > error_at) for i, v in enumerate(self.values)]
        return ";".join(f"{values[i]}{change:+d}={values[i + 1]}" for i, change in enumerate(self.changes[:num_steps]))

    @property
    def is_held_out(self) -> bool:
        """Whether the problem belongs to the held-out set.

        Depends only on the numbers: the same arithmetic is never in both sets, whatever the seed.
        """
        return zlib.crc32(repr((self.start, *self.changes)).encode()) % HELDOUT_ONE_IN == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticFiles:
    """Files that `write_arithmetic` wrote."""

    sft: Path
    """`{prompt, response}`: demonstrations of the training problems."""
    train: Path
    """`{prompt, answer}`: the training problems."""
    heldout: Path
    """`{prompt, answer, response}`: held-out problems with full solutions."""
    preferences: Path
    """`{prompt, chosen, rejected}`: pairs of answers to the training problems."""
    heldout_preferences: Path
    """`{prompt, chosen, rejected}`: pairs of answers to the held-out problems."""


def write_arithmetic(
    directory: str | Path, seed: int, num_train: int = 6000, num_heldout: int = 300
) -> ArithmeticFiles:
    """Write the files of `ArithmeticFiles` into `directory`; the same seed gives the same bytes.

    Raises:
        DataError: more problems are requested than exist.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    train, heldout = make_problems(rng, num_train, num_heldout)
    files = ArithmeticFiles(
        sft=directory / "sft.jsonl",
        train=directory / "train.jsonl",
        heldout=directory / "heldout.jsonl",
        preferences=directory / "preferences.jsonl",
        heldout_preferences=directory / "heldout-preferences.jsonl",
    )
    _write_jsonl(files.sft, ({"prompt": p.prompt, "response": sample_demonstration(p, rng)} for p in train))
    _write_jsonl(files.train, ({"prompt": p.prompt, "answer": p.answer} for p in train))
    _write_jsonl(files.heldout, ({"prompt": p.prompt, "answer": p.answer, "response": p.solution} for p in heldout))
    _write_jsonl(files.preferences, (pair for p in train for pair in make_preference_pairs(p, rng, PAIRS_PER_PROBLEM)))
    _write_jsonl(files.heldout_preferences, (pair for p in heldout for pair in make_preference_pairs(p, rng, 1)))
    return files


def make_problems(
    rng: random.Random, num_train: int, num_heldout: int
) -> tuple[list[ArithmeticProblem], list[ArithmeticProblem]]:
    """Return `num_train` distinct training problems and `num_heldout` distinct held-out problems.

    Raises:
        DataError: more problems are requested than exist.
    """
    train: dict[str, ArithmeticProblem] = {}
    heldout: dict[str, ArithmeticProblem] = {}
    repeats = 0
    while len(train) < num_train or len(heldout) < num_heldout:
        problem = sample_problem(rng)
        side, wanted = (heldout, num_heldout) if problem.is_held_out else (train, num_train)
        if len(side) < wanted and problem.prompt not in side:
            side[problem.prompt] = problem
            repeats = 0
        else:
            repeats += 1
        if repeats > MAX_REPEATS:
            raise DataError(
                f"there are no further word problems after {len(train)} of {num_train} training problems and "
                f"{len(heldout)} of {num_heldout} held-out problems; request fewer"
            )
    return list(train.values()), list(heldout.values())


def sample_problem(rng: random.Random) -> ArithmeticProblem:
    """Sample a problem whose count never falls below 1."""
    num_steps = 1 if rng.random() < ONE_STEP_SHARE else 2
    while True:
        start = rng.randint(1, MAX_START)
        changes = tuple(rng.choice((1, -1)) * rng.randint(1, MAX_CHANGE) for _ in range(num_steps))
        if start + changes[0] >= 1 and start + sum(changes) >= 1:
            break
    actions = tuple(rng.choice(GAINS if c > 0 else LOSSES).format(abs(c)) for c in changes)
    return ArithmeticProblem(
        start=start, changes=changes, name=rng.choice(NAMES), thing=rng.choice(THINGS), actions=actions
    )


def sample_demonstration(problem: ArithmeticProblem, rng: random.Random) -> str:
    """Return the full solution or, for most two-step problems, one that stops after step one with a wrong answer."""
    stops_early = len(problem.changes) == 2 and rng.random() < EARLY_STOP_SHARE
    return problem.partial_solution(1) if stops_early else problem.solution


def make_preference_pairs(problem: ArithmeticProblem, rng: random.Random, count: int) -> list[dict[str, str]]:
    """Return up to `count` preference pairs: the full solution and distinct rejected answers."""
    worse = dict.fromkeys(sample_rejected_answer(problem, rng) for _ in range(count))
    return [{"prompt": problem.prompt, "chosen": problem.solution, "rejected": answer} for answer in worse]


def sample_rejected_answer(problem: ArithmeticProblem, rng: random.Random) -> str:
    """Sample an answer worse than the full solution: it stops after step one, miscounts, or states no answer."""
    num_steps = len(problem.changes)
    if rng.random() < NO_ANSWER_SHARE[num_steps]:
        return problem.format_steps(rng.randint(1, num_steps))
    if num_steps == 2 and rng.random() < REJECTED_EARLY_STOP_SHARE:
        return problem.partial_solution(1)
    # error_at == num_steps: only the stated answer is wrong
    error_at = rng.randint(0, num_steps)
    signs = (1,) if min(problem.values) <= MAX_ERROR else (1, -1)
    error = rng.randint(1, MAX_ERROR) * rng.choice(signs)
    return f"{problem.format_steps(num_steps, error_at=error_at, error=error)} #### {problem.values[-1] + error}"


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
