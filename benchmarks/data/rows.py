"""A JSONL file of prompts with known numbers of equal rows, blank answers and prompts that are held out too."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

NUM_HELD_OUT = 2000

REPEATED_PROMPT, REPEATED_ROW, BLANK_ANSWER, HELD_OUT_PROMPT = 1000, 5000, 10_000, 20
"""One row of so many, from the second such number on, is of this kind; of the last, one held-out row."""

WORDS = [
    f"{start}{end}"
    for start in ["ba", "co", "du", "fi", "lo", "me", "nu", "pa", "ri", "so", "ti", "vu"]
    for end in ["n", "r", "l", "s", "t", "m", "ve", "ld"]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the files hold."""

    num_rows: int
    bytes: int
    repeated_prompts: int
    """Rows whose prompt an earlier row has, perhaps with other whitespace."""
    repeated_rows: int
    blank_answers: int
    shared_prompts: int
    """Held-out rows whose prompt is in the training file."""


def write_files(folder: Path, num_rows: int, seed: int = 0) -> Counts:
    """Write `train.jsonl` and `heldout.jsonl` to `folder`, about 300 bytes a row; return what they hold."""
    rng = random.Random(seed)
    repeated_prompts = repeated_rows = blank = shared = 0
    first: dict[str, object] = {}
    question = ""
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            fields = _fields(rng, i)
            if i and i % REPEATED_ROW == 0:
                fields, repeated_rows, repeated_prompts = first, repeated_rows + 1, repeated_prompts + 1
            elif i and i % REPEATED_PROMPT == 0:
                fields["prompt"] = question.replace(" ", "  ") + "\n"
                fields["answer"] = str(10_000 + i)  # of no other row, so that the whole row is not repeated
                repeated_prompts += 1
            if i and i % BLANK_ANSWER == BLANK_ANSWER // 2 + 1:
                fields["answer"] = " "
                blank += 1
            if i == 0:
                first, question = fields, str(fields["prompt"])
            file.write(json.dumps(fields) + "\n")
        size = file.tell()
    with (folder / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for i in range(NUM_HELD_OUT):
            fields = _fields(rng, num_rows + i)
            if i % HELD_OUT_PROMPT == 0:
                fields["prompt"] = " " + question
                shared += 1
            file.write(json.dumps(fields) + "\n")
    return Counts(
        num_rows=num_rows,
        bytes=size,
        repeated_prompts=repeated_prompts,
        repeated_rows=repeated_rows,
        blank_answers=blank,
        shared_prompts=shared,
    )


def _fields(rng: random.Random, number: int) -> dict[str, object]:
    words = " ".join(rng.choices(WORDS, k=44))
    return {
        "prompt": f"Problem {number}: {words}?",
        "answer": str(rng.randrange(10_000)),
        "source": rng.choice(["algebra", "geometry", "counting"]),
        "level": rng.randrange(1, 6),
        "unused": None,
    }
