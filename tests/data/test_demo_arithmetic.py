"""The arithmetic demo data: correctness, splits and determinism."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from megarl.data.demo_arithmetic import make_problems, sample_problem, write_arithmetic
from megarl.errors import DataError
from tests.data.conftest import read_jsonl
from tests.errors import expect_error

SENTENCE = re.compile(r"(\w+) has (\d+) (\w+)\. \1 (.+)\. How many \3\?\n")


def parse_numbers(prompt: str) -> tuple[int, ...]:
    """Parse the numbers of a problem from its text."""
    match = SENTENCE.fullmatch(prompt)
    assert match, prompt
    numbers = [int(number) for number in re.findall(r"\d+", match[4])]
    signs = [1 if action.endswith(" more") else -1 for action in match[4].split(" and ")]
    return (int(match[2]), *(sign * number for sign, number in zip(signs, numbers, strict=True)))


def test_answers_are_right_and_heldout_problems_are_disjoint(arithmetic: Path) -> None:
    train, heldout = read_jsonl(arithmetic / "train.jsonl"), read_jsonl(arithmetic / "heldout.jsonl")
    assert (len(train), len(heldout)) == (6000, 300)
    for row in train + heldout:
        assert int(row["answer"]) == sum(parse_numbers(row["prompt"]))
    assert not {parse_numbers(r["prompt"]) for r in train} & {parse_numbers(r["prompt"]) for r in heldout}
    assert len({r["prompt"] for r in train}) == 6000


def test_demonstrations_are_correct_steps_and_most_stop_early(arithmetic: Path) -> None:
    stop_early = two_steps = 0
    for row, trained in zip(read_jsonl(arithmetic / "sft.jsonl"), read_jsonl(arithmetic / "train.jsonl"), strict=True):
        assert row["prompt"] == trained["prompt"]
        solution, _, final = row["response"].partition(" #### ")
        steps = re.findall(r"(\d+)([+-]\d+)=(\d+)", solution)
        assert ";".join(f"{a}{b}={c}" for a, b, c in steps) == solution
        assert all(int(a) + int(b) == int(c) for a, b, c in steps)
        assert final == steps[-1][2]
        if len(parse_numbers(row["prompt"])) == 3:
            two_steps += 1
            stop_early += len(steps) == 1
        else:
            assert final == trained["answer"]
    assert 0.6 < two_steps / 6000 < 0.8
    assert 0.57 < stop_early / two_steps < 0.63


def test_heldout_responses_contain_every_step(arithmetic: Path) -> None:
    for row in read_jsonl(arithmetic / "heldout.jsonl"):
        assert row["response"].endswith(f" #### {row['answer']}")
        assert row["response"].count("=") == len(parse_numbers(row["prompt"])) - 1


@pytest.mark.parametrize(("kind", "problems"), [("preferences", "train"), ("heldout-preferences", "heldout")])
def test_only_the_chosen_answer_is_right_and_complete(kind: str, problems: str, arithmetic: Path) -> None:
    kinds = {"wrong": 0, "stops early": 0, "no answer": 0}
    pairs = read_jsonl(arithmetic / f"{kind}.jsonl")
    answers = {row["prompt"]: row["answer"] for row in read_jsonl(arithmetic / f"{problems}.jsonl")}
    assert list(answers) == list(dict.fromkeys(pair["prompt"] for pair in pairs))
    assert len({(pair["prompt"], pair["rejected"]) for pair in pairs}) == len(pairs)
    for pair in pairs:
        answer = answers[pair["prompt"]]
        count, *changes = parse_numbers(pair["prompt"])
        steps = []
        for change in changes:
            steps.append(f"{count}{change:+d}={count + change}")
            count += change
        assert pair["chosen"] == f"{';'.join(steps)} #### {answer}"
        solution, marker, final = pair["rejected"].partition(" #### ")
        assert "-" not in re.sub(r"\d-", "", pair["rejected"])
        if not marker:
            kinds["no answer"] += 1
            assert ";".join(steps).startswith(solution)
        elif len(steps) == 2 and solution == steps[0]:
            kinds["stops early"] += 1
            assert steps[0].endswith(f"={final}")
        else:
            kinds["wrong"] += 1
            assert solution.count("=") == len(steps)
            assert 1 <= abs(int(final) - int(answer)) <= 3
    assert all(count > 0.1 * len(pairs) for count in kinds.values()), kinds


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    a, b, c = (
        write_arithmetic(tmp_path / name, seed, num_train=50, num_heldout=10)
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    for kind in ("sft", "train", "heldout", "preferences", "heldout_preferences"):
        assert getattr(a, kind).read_bytes() == getattr(b, kind).read_bytes()
        assert getattr(a, kind).read_bytes() != getattr(c, kind).read_bytes()


def test_the_split_does_not_depend_on_the_seed_and_numbers_are_small() -> None:
    (train, _), (_, heldout) = make_problems(random.Random(1), 2000, 1), make_problems(random.Random(2), 1, 300)
    assert not {(p.start, p.changes) for p in train} & {(p.start, p.changes) for p in heldout}
    rng = random.Random(0)
    for problem in (*train, *(sample_problem(rng) for _ in range(2000))):
        assert 1 <= problem.start <= 9
        assert all(1 <= abs(c) <= 6 for c in problem.changes)
        assert min(problem.values) >= 1


def test_requesting_too_many_problems_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_REPEATS": 50, "NAMES": ("Ann",), "THINGS": ("pens",)}.items():
        monkeypatch.setattr(f"megarl.data.demo_arithmetic.{name}", value)
    with expect_error(DataError, "1000000", "problems", "training"):
        make_problems(random.Random(0), 1_000_000, 1)
