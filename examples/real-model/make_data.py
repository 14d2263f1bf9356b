"""Write FOLDER/train.jsonl and FOLDER/heldout.jsonl: prompts that ask for a sentence with two given words.

python make_data.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from itertools import combinations
from pathlib import Path

TRAIN_WORDS = """\
anchor apple basket beach bicycle boat book bottle box bridge bucket candle carpet castle chair cloud coat coin
curtain desk dog door drum farm feather fence flower glove hammer hat hill honey island jacket key kite ladder leaf
letter mirror moon mouse nest orange owl paint paper pillow pocket pond rabbit ring rope shoe soap spoon stone sugar
table tower"""

HELDOUT_WORDS = """\
bread camera clock doctor engine forest garden guitar horse kitchen lamp lemon market mountain painting pencil piano
river shirt soup teacher train umbrella window"""

HELDOUT = 240


def main(folder: Path) -> None:
    """Write 1,770 training prompts and 240 held-out ones, which share no word."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", TRAIN_WORDS)
    write(folder / "heldout.jsonl", HELDOUT_WORDS, limit=HELDOUT)


def write(file: Path, words: str, limit: int | None = None) -> None:
    """Write a prompt for each pair of words, in random order and at most `limit`."""
    order = random.Random(0)
    pairs = [order.sample(pair, 2) for pair in combinations(words.split(), 2)]
    order.shuffle(pairs)
    rows = [{"prompt": chat(*pair), "words": " ".join(pair)} for pair in pairs[:limit]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(first: str, second: str) -> list[dict[str, str]]:
    """Return the messages that ask for a sentence."""
    return [
        {"role": "system", "content": "You write one short sentence."},
        {"role": "user", "content": f"Write a sentence with the words {first} and {second}."},
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
