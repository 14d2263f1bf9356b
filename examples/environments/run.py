"""Write the data of an environment, fine-tune a tiny model on demonstrations, and train it: `run.py NAME`.

Further arguments go to `megarl train`. `--control` trains with rewards that do not depend on what the policy did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "yaml" / "agents"


def main() -> None:
    """Run the stages one after the other, and print the score before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("calculator", "guess", "http", "python", "search"))
    parser.add_argument("--control", action="store_true")
    args, overrides = parser.parse_known_args()
    started, folder = time.perf_counter(), Path("runs") / args.name
    run_dir = folder / "control" if args.control else folder / "rl"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    if not (folder / "sft" / "model").exists():
        call([str(HERE / "make_data.py"), args.name, str(folder / "data")])
        call(["-m", "megarl", "sft", str(RECIPES / f"{args.name}-sft.yaml")])
    control = [
        "reward.terms.game.weight=0",
        'reward.terms.control={type: python, path: "control:shuffled", per: group}',
    ]
    settings = [f"run_dir={run_dir}", *(control if args.control else [])]
    with serve_facts(folder / "data" / "facts.jsonl") if args.name == "http" else nullcontext([]) as address:
        settings += address
        call(["-m", "megarl", "train", str(RECIPES / f"{args.name}.yaml"), *overrides, "--set", *settings])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = [(row["step"], row["eval/game"]) for row in rows if "eval/game" in row]
    rewards = " ".join(f"{row['reward/game']:.2f}" for row in rows if "reward/game" in row)
    held_out = "  ".join(f"{step}: {score:.3f}" for step, score in scores)
    seconds = time.perf_counter() - started
    sys.stdout.write(f"held-out score by step: {held_out}\nreward by step: {rewards}\n{seconds:.0f} s in total\n")


@contextmanager
def serve_facts(path: Path) -> Iterator[list[str]]:
    """Run `api.py`, and yield the settings with its address."""
    command = [sys.executable, str(HERE / "api.py"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:  # noqa: S603
        assert api.stdout is not None
        url = api.stdout.readline().strip()
        try:
            yield [f"rollout.env.kwargs.base_url={url}", f'rollout.env.kwargs.allow=["{url}"]']
        finally:
            api.terminate()


def call(arguments: list[str]) -> None:
    """Run Python with these arguments; end with its exit code if it fails."""
    code = subprocess.run([sys.executable, *arguments], check=False).returncode  # noqa: S603
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
