"""The data of examples/environments: its demonstrations are those of the environments that the recipes name."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.batch.trajectory import Prompt
from megarl.config.import_path import load_object
from megarl.rollout.environments.environment import Task

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "environments"

NUM_PLAYED = 20


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_environment(name: str, folder: Path, **kwargs: Any) -> Any:
    """Return an environment of the recipe, with the data of `folder`."""
    text = (ROOT / "yaml" / "agents" / f"{name}.yaml").read_text().replace(f"runs/{name}/data", str(folder))
    config = yaml.safe_load(text)["rollout"]["env"]
    environment: Any = load_object(config["path"], key="rollout.env.path", kind="class")
    return environment(**config.get("kwargs", {}) | kwargs)


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@contextmanager
def serve_facts(folder: Path) -> Iterator[str]:
    """Yield the address of an API with the facts of `folder`."""
    command = [sys.executable, str(SCRIPTS / "api.py"), str(folder / "facts.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:
        assert api.stdout is not None
        try:
            yield api.stdout.readline().strip()
        finally:
            api.terminate()


@pytest.mark.parametrize("name", ["calculator", "http", "python", "search"])
def test_demonstrated_calls_have_the_results_of_the_environment(name: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / "make_data.py"), name, str(tmp_path)], check=True)
    train, held_out = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert len(train) >= 3900
    assert len(held_out) >= 150
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    demonstrations = read(tmp_path / "sft.jsonl")
    first = [row["response"] for row in demonstrations if len(row["prompt"]) == 1]
    assert 0.2 < sum("####" not in response for response in first) / len(first) < 0.3
    answers = {row["prompt"]: row["answer"] for row in train}
    played = [row for row in demonstrations if len(row["prompt"]) > 1][:NUM_PLAYED]
    assert len(played) == NUM_PLAYED
    with serve_facts(tmp_path) if name == "http" else nullcontext() as url:
        kwargs = {} if url is None else {"allow": [url], "base_url": url}
        asyncio.run(play(partial(make_environment, name, tmp_path, **kwargs), played, answers))


async def play(make: Callable[[], Any], played: Sequence[dict[str, Any]], answers: Mapping[str, str]) -> None:
    shared: dict[str, Any] = {}
    for row in played:
        question, call, result = row["prompt"]
        env = make()
        prompt = Prompt(prompt_id="p:1", text="", token_ids=(), row={}, answer=answers[question["content"]])
        try:
            await result_of(env.reset(Task(prompt=prompt, messages=[question], seed=1, shared=shared)))
            step = await result_of(env.step(call["content"]))
            assert list(step.messages) == [result]
            assert (await result_of(env.step(row["response"]))).reward == 1.0
        finally:
            await result_of(env.close())
