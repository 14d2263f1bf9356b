"""Write problems and demonstrations for an environment: `make_data.py NAME FOLDER`."""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

NUM_TRAIN, NUM_HELD_OUT = 4000, 200

CALLS = 0.25
"""Share of the demonstrations that call the tool; the others answer at once, which a small model gets wrong."""

NUM_TOWNS = 1050

KINDS = ("mayor", "river", "bridge", "saint")
"""What is asked about a town; words in half of the passages would have no weight in BM25."""

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"

GUESSES = range(1, 8)

FOLLOWED = 0.5
"""Share of the demonstrated games in which the player follows the hints; in the others any number is guessed."""

RULES = "Guess a number from 1 to 7."


Rows = list[dict[str, Any]]


def main() -> None:
    """Write train.jsonl, heldout.jsonl and sft.jsonl; for `search` and `http` also the facts that they find."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MAKERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in MAKERS[args.name](random.Random(args.seed)).items():
        write(args.folder / f"{name}.jsonl", rows)


def calculator(rng: random.Random) -> dict[str, Rows]:
    """Return products of two numbers, from which a third is taken away; the held-out ones appear nowhere else."""
    return compose(rng, draw_product, "{}?", "calc({})")


def tool_calls(rng: random.Random) -> dict[str, Rows]:
    """Return the problems of `calculator`, with calls as JSON of a function that the prompts of demonstrations name."""
    call = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
    rows = compose(rng, draw_product, "{}?", call)
    tools = {"role": "tools", "content": "calculate(expression)\n"}  # as the chat template writes definitions
    return rows | {"sft": [row | {"prompt": [tools, *row["prompt"]]} for row in rows["sft"]]}


def python(rng: random.Random) -> dict[str, Rows]:
    """Return powers of which the sum of the digits is asked; the held-out ones appear nowhere else."""
    return compose(rng, draw_power, "digits of {}?", "```python\nprint(sum(map(int, str({}))))\n```")


def search(rng: random.Random) -> dict[str, Rows]:
    """Return questions about invented towns, and the passages that answer them."""
    files = ask_facts(rng, "{kind} of {town}?", "search({kind} of {town})", "{town}: The {kind} is {answer}.")
    passages = [{"title": fact["town"], "text": f"The {fact['kind']} is {fact['answer']}."} for fact in files["facts"]]
    return files | {"passages": passages}


def http(rng: random.Random) -> dict[str, Rows]:
    """Return questions about invented towns, and the facts that `api.py` serves.

    A question has the path to request: a small model copies names, and does not learn to compose a path of them.
    """
    return ask_facts(rng, "{kind}/{town}?", "http GET /{kind}/{town}", "200 {answer}")


def ask_facts(rng: random.Random, question: str, call: str, result: str) -> dict[str, Rows]:
    """Return questions about invented towns, demonstrations, and all facts; held-out towns are in the facts only.

    Args:
        question, call, result: what is asked, the tool call that answers it, and its result.
    """
    names = list({draw_name(rng, syllables=2): None for _ in range(3 * NUM_TOWNS)})[:NUM_TOWNS]
    facts: Rows = []
    questions: dict[bool, dict[str, str]] = {True: {}, False: {}}
    demonstrations: Rows = []
    for town in names:
        for kind in KINDS:
            fact = {"kind": kind, "town": town, "answer": draw_name(rng, syllables=3)}
            facts.append(fact)
            asked, answer = question.format(**fact), f"#### {fact['answer']}"
            questions[is_trained(town)][asked] = fact["answer"]
            if is_trained(town):
                demonstrations += demonstrate(rng, asked, call.format(**fact), result.format(**fact), answer)
    return {
        "train": to_rows(questions[True]),
        "heldout": to_rows(questions[False]),
        "sft": demonstrations,
        "facts": facts,
    }


def guess(rng: random.Random) -> dict[str, Rows]:
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


def draw_product(rng: random.Random) -> tuple[str, str]:
    """Return an expression and its value."""
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    return f"{a}*{b}-{c}", str(a * b - c)


def draw_power(rng: random.Random) -> tuple[str, str]:
    """Return a power and the sum of its digits."""
    base, exponent = rng.randint(11, 99), rng.randint(11, 99)
    return f"{base}**{exponent}", str(sum(map(int, str(base**exponent))))


def compose(
    rng: random.Random, draw: Callable[[random.Random], tuple[str, str]], question: str, call: str
) -> dict[str, Rows]:
    """Return different problems of `draw`, with demonstrations of those to train on.

    Args:
        question: what is asked about an expression `{}`.
        call: the tool call that answers it.
    """
    problems: dict[bool, dict[str, str]] = {True: {}, False: {}}
    while len(problems[True]) < NUM_TRAIN or len(problems[False]) < NUM_HELD_OUT:
        text, answer = draw(rng)
        problems[is_trained(text)][text] = answer
    train, held_out = list(problems[True].items())[:NUM_TRAIN], list(problems[False].items())[:NUM_HELD_OUT]
    return {
        "train": to_rows({question.format(text): answer for text, answer in train}),
        "heldout": to_rows({question.format(text): answer for text, answer in held_out}),
        "sft": [
            row
            for text, answer in train
            for row in demonstrate(rng, question.format(text), call.format(text), answer, f"#### {answer}")
        ],
    }


def is_trained(text: str) -> bool:
    """Whether a problem is trained on; one in 20 is held out."""
    return zlib.crc32(text.encode()) % 20 != 0


def draw_name(rng: random.Random, *, syllables: int) -> str:
    """Return a name such as Tiku."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables)).capitalize()


def demonstrate(rng: random.Random, question: str, call: str, result: str, answer: str) -> Iterator[dict[str, Any]]:
    """Yield the first reply to a question, which calls the tool in a share `CALLS`, and the reply to its result."""
    yield {"prompt": [user(question)], "response": call if rng.random() < CALLS else answer}
    messages = [user(question), {"role": "assistant", "content": call}, {"role": "tool", "content": result}]
    yield {"prompt": messages, "response": answer}


def to_rows(answers: Mapping[str, str]) -> Rows:
    """Return the rows of questions with their answers."""
    return [{"prompt": question, "answer": answer} for question, answer in answers.items()]


def user(content: str) -> dict[str, str]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


MAKERS = {
    "calculator": calculator,
    "guess": guess,
    "http": http,
    "python": python,
    "search": search,
    "tool-calls": tool_calls,
}


if __name__ == "__main__":
    main()
