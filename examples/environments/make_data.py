"""Write problems and demonstrations for an environment: `make_data.py calculator|guess FOLDER`."""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NUM_TRAIN, NUM_HELD_OUT = 4000, 200

CALLS = 0.25
"""Share of the demonstrations that call the calculator; the others answer at once, which a small model gets wrong."""

GUESSES = range(1, 8)

FOLLOWED = 0.5
"""Share of the demonstrated games in which the player follows the hints; in the others any number is guessed."""

RULES = "Guess a number from 1 to 7."


def main() -> None:
    """Write train.jsonl, heldout.jsonl and sft.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("calculator", "guess"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (calculator(rng) if args.name == "calculator" else guess(rng)).items():
        write(args.folder / f"{name}.jsonl", rows)


def calculator(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Return products of two numbers, from which a third is taken away; the held-out ones appear nowhere else."""
    problems: dict[bool, dict[str, str]] = {True: {}, False: {}}
    while len(problems[True]) < NUM_TRAIN or len(problems[False]) < NUM_HELD_OUT:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        text = f"{a}*{b}-{c}"
        problems[zlib.crc32(text.encode()) % 20 != 0][text] = str(a * b - c)
    train, held_out = (list(problems[kind].items()) for kind in (True, False))
    demonstrations: list[dict[str, Any]] = []
    for expression, answer in train:
        question = [user(f"{expression}?")]
        call = {"role": "assistant", "content": f"calc({expression})"}
        answered = f"#### {answer}"
        demonstrations.append({"prompt": question, "response": call["content"] if rng.random() < CALLS else answered})
        result = [{"role": "tool", "content": answer}]
        demonstrations.append({"prompt": [*question, call, *result], "response": answered})
    return {
        "train": [{"prompt": f"{text}?", "answer": answer} for text, answer in train[:NUM_TRAIN]],
        "heldout": [{"prompt": f"{text}?", "answer": answer} for text, answer in held_out[:NUM_HELD_OUT]],
        "sft": demonstrations,
    }


def guess(rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Return games, and demonstrations of a player who follows the hints in half of the games."""
    demonstrations = []
    for _ in range(NUM_TRAIN):
        number, low, high = rng.choice(GUESSES), GUESSES[0], GUESSES[-1]
        follows = rng.random() < FOLLOWED
        talk = [user(RULES)]
        for _turn in range(3):
            guessed = rng.randint(low, high) if follows else rng.choice(GUESSES)
            demonstrations.append({"prompt": [*talk], "response": str(guessed)})
            if guessed == number:
                break
            low, high = (guessed + 1, high) if number > guessed else (low, guessed - 1)
            hint = "higher" if number > guessed else "lower"
            talk += [{"role": "assistant", "content": str(guessed)}, user(hint)]
    games = [{"prompt": RULES, "answer": str(rng.choice(GUESSES))} for _ in range(NUM_TRAIN)]
    held_out = [{"prompt": RULES, "answer": str(number)} for number in GUESSES]
    return {"train": games, "heldout": held_out, "sft": demonstrations}


def user(content: str) -> dict[str, str]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
