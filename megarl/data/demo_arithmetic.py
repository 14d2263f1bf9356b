"""Word problems that a half-million-parameter model learns within a minute of CPU time.

    Mia has 8 pens. Mia gets 3 more and sells 2. How many pens?
    8+3=11;11-2=9 #### 9

Most demonstrations of two-step problems stop after step one, so a fine-tuned model knows both behaviours and stops by
habit; only reinforcement learning tells it which one is right.
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

LARGEST_START = 9
LARGEST_CHANGE = 6
"""Past these, adding becomes the bottleneck and the habit of stopping no longer shows."""

ONE_STEP_SHARE = 0.3
HASTY_SHARE = 0.6
"""Demonstrations of two-step problems that stop after step one."""

PAIRS_PER_PROBLEM = 4
"""Rejected answers drawn for each training problem; those drawn twice count once."""

UNFINISHED_SHARE = {1: 0.6, 2: 0.2}
"""By number of steps, rejected answers that break off before they say what the answer is."""

REJECTED_HASTY_SHARE = 0.7
"""Of the finished rejected answers to two-step problems, those that stop after step one: what a policy gets wrong."""

LARGEST_SLIP = 3
"""By so much a rejected answer miscounts at most."""

HELDOUT_ONE_IN = 5
MAX_REPEATS = 100_000
"""Problems drawn in vain, one after another, before the generator gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One word problem."""

    start: int
    changes: tuple[int, ...]
    """One or two steps, negative where something is lost."""
    name: str
    thing: str
    actions: tuple[str, ...]
    """The changes in words."""

    @property
    def values(self) -> tuple[int, ...]:
        """The count at the start and after each step."""
        values = [self.start]
        for change in self.changes:
            values.append(values[-1] + change)
        return tuple(values)

    @property
    def prompt(self) -> str:
        """The problem as text, its line ended: the policy goes on below it."""
        return (
            f"{self.name} has {self.start} {self.thing}. {self.name} {' and '.join(self.actions)}. "
            f"How many {self.thing}?\n"
        )

    @property
    def answer(self) -> str:
        """The count at the end."""
        return str(self.values[-1])

    @property
    def solution(self) -> str:
        """Every step worked out, and the right answer."""
        return self.worked(len(self.changes))

    def worked(self, num_steps: int) -> str:
        """The first `num_steps` steps, and what they come to as the answer."""
        return f"{self.steps(num_steps)} #### {self.values[num_steps]}"

    def steps(self, num_steps: int, *, slip_at: int | None = None, slip: int = 0) -> str:
        """The first `num_steps` steps; from step `slip_at` on every count is `slip` too high."""
        values = [v + slip * (slip_at is not None and i > slip_at) for i, v in enumerate(self.values)]
        return ";".join(f"{values[i]}{change:+d}={values[i + 1]}" for i, change in enumerate(self.changes[:num_steps]))

    @property
    def held_out(self) -> bool:
        """Decided by the numbers alone: the same arithmetic never stands on both sides, whatever the seed."""
        return zlib.crc32(repr((self.start, *self.changes)).encode()) % HELDOUT_ONE_IN == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticFiles:
    """What `write_arithmetic` wrote."""

    sft: Path
    """`{prompt, response}`: demonstrations of the training problems."""
    train: Path
    """`{prompt, answer}`: the training problems."""
    heldout: Path
    """`{prompt, answer, response}`: other arithmetic, worked out in full."""
    preferences: Path
    """`{prompt, chosen, rejected}`: answers to the training problems, see `rejected`."""
    heldout_preferences: Path
    """The same of the held-out problems."""


def write_arithmetic(
    directory: str | Path, seed: int, num_train: int = 6000, num_heldout: int = 300
) -> ArithmeticFiles:
    """Write the files that `ArithmeticFiles` names into `directory`; the same seed gives the same bytes.

    Raises:
        DataError: more problems asked for than there are.
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
    _write_jsonl(files.sft, ({"prompt": p.prompt, "response": demonstration(p, rng)} for p in train))
    _write_jsonl(files.train, ({"prompt": p.prompt, "answer": p.answer} for p in train))
    _write_jsonl(files.heldout, ({"prompt": p.prompt, "answer": p.answer, "response": p.solution} for p in heldout))
    _write_jsonl(files.preferences, (pair for p in train for pair in preferences(p, rng, PAIRS_PER_PROBLEM)))
    _write_jsonl(files.heldout_preferences, (pair for p in heldout for pair in preferences(p, rng, 1)))
    return files


def make_problems(rng: random.Random, num_train: int, num_heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Different training and held-out problems, as many as asked for.

    Raises:
        DataError: more problems asked for than there are.
    """
    train: dict[str, Problem] = {}
    heldout: dict[str, Problem] = {}
    repeats = 0
    while len(train) < num_train or len(heldout) < num_heldout:
        problem = draw_problem(rng)
        side, wanted = (heldout, num_heldout) if problem.held_out else (train, num_train)
        if len(side) < wanted and problem.prompt not in side:
            side[problem.prompt] = problem
            repeats = 0
        else:
            repeats += 1
        if repeats > MAX_REPEATS:
            raise DataError(
                f"no further word problems after {len(train)} of {num_train} to train on and {len(heldout)} of "
                f"{num_heldout} held out; ask for fewer"
            )
    return list(train.values()), list(heldout.values())


def draw_problem(rng: random.Random) -> Problem:
    """One problem whose count never falls below 1."""
    num_steps = 1 if rng.random() < ONE_STEP_SHARE else 2
    while True:
        start = rng.randint(1, LARGEST_START)
        changes = tuple(rng.choice((1, -1)) * rng.randint(1, LARGEST_CHANGE) for _ in range(num_steps))
        if start + changes[0] >= 1 and start + sum(changes) >= 1:
            break
    actions = tuple(rng.choice(GAINS if c > 0 else LOSSES).format(abs(c)) for c in changes)
    return Problem(start=start, changes=changes, name=rng.choice(NAMES), thing=rng.choice(THINGS), actions=actions)


def demonstration(problem: Problem, rng: random.Random) -> str:
    """The full solution, or, for most two-step problems, one that stops after step one: right format, wrong answer."""
    hasty = len(problem.changes) == 2 and rng.random() < HASTY_SHARE
    return problem.worked(1) if hasty else problem.solution


def preferences(problem: Problem, rng: random.Random, count: int) -> list[dict[str, str]]:
    """Up to `count` pairs, each of the full solution and another worse answer."""
    worse = dict.fromkeys(rejected(problem, rng) for _ in range(count))
    return [{"prompt": problem.prompt, "chosen": problem.solution, "rejected": answer} for answer in worse]


def rejected(problem: Problem, rng: random.Random) -> str:
    """A worse answer than the full solution: it stops after step one of two, miscounts, or breaks off."""
    num_steps = len(problem.changes)
    if rng.random() < UNFINISHED_SHARE[num_steps]:
        return problem.steps(rng.randint(1, num_steps))
    if num_steps == 2 and rng.random() < REJECTED_HASTY_SHARE:
        return problem.worked(1)
    # a slip behind the last step is one of the answer alone
    slip_at = rng.randint(0, num_steps)
    signs = (1,) if min(problem.values) <= LARGEST_SLIP else (1, -1)
    slip = rng.randint(1, LARGEST_SLIP) * rng.choice(signs)
    return f"{problem.steps(num_steps, slip_at=slip_at, slip=slip)} #### {problem.values[-1] + slip}"


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
