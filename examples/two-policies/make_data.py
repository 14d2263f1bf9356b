"""Write the data of both policies: `make_data.py FOLDER`."""

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PROPOSE = "Pose a problem.\n"

NUM_DEMONSTRATIONS = 6000

RIGHT = {"+": 0.8, "-": 0.3}
"""Share of the demonstrated sums and differences that are right: the proposer has something to find."""


def main() -> None:
    """Write sft.jsonl, demonstrations of both roles, and train.jsonl, the prompts of the proposer."""
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations = []
    for _ in range(NUM_DEMONSTRATIONS):
        a, b, operator = rng.randint(1, 9), rng.randint(1, 9), rng.choice("+-")
        answer = a + b if operator == "+" else a - b
        given = answer if rng.random() < RIGHT[operator] else answer + rng.choice([-2, -1, 1, 2])
        problem = f"{a}{operator}{b}"
        demonstrations.append({"prompt": PROPOSE, "response": problem})
        demonstrations.append({"prompt": f"{problem}\n", "response": f"#### {given}"})
    write(folder / "sft.jsonl", demonstrations)
    write(folder / "train.jsonl", [{"prompt": PROPOSE} for _ in range(64)])


def write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write the rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
