from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from megarl.data.demo_arithmetic import draw_problem, make_problems, write_arithmetic
from megarl.errors import DataError

SENTENCE = re.compile(r"(\w+) has (\d+) (\w+)\. \1 (.+)\. How many \3\?\n")


def numbers(prompt: str) -> tuple[int, ...]:
    """The problem's numbers, read back from its words."""
    match = SENTENCE.fullmatch(prompt)
    assert match, prompt
    signed = [
        int(re.findall(r"\d+", action)[0]) * (1 if action.endswith(" more") else -1)
        for action in match[4].split(" and ")
    ]
    return (int(match[2]), *signed)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_right_and_heldout_arithmetic_is_new(arithmetic: Path) -> None:
    train, heldout = rows(arithmetic / "train.jsonl"), rows(arithmetic / "heldout.jsonl")
    assert (len(train), len(heldout)) == (6000, 300)
    for row in train + heldout:
        assert int(row["answer"]) == sum(numbers(row["prompt"]))
    assert not {numbers(r["prompt"]) for r in train} & {numbers(r["prompt"]) for r in heldout}
    assert len({r["prompt"] for r in train}) == 6000


def test_demonstrations_are_sound_arithmetic_of_which_most_stop_early(arithmetic: Path) -> None:
    hasty = two_steps = 0
    for row, trained in zip(rows(arithmetic / "sft.jsonl"), rows(arithmetic / "train.jsonl"), strict=True):
        assert row["prompt"] == trained["prompt"]
        worked, _, final = row["response"].partition(" #### ")
        steps = re.findall(r"(\d+)([+-]\d+)=(\d+)", worked)
        assert ";".join(f"{a}{b}={c}" for a, b, c in steps) == worked
        assert all(int(a) + int(b) == int(c) for a, b, c in steps)
        assert final == steps[-1][2]
        if len(numbers(row["prompt"])) == 3:
            two_steps += 1
            hasty += len(steps) == 1
        else:
            assert final == trained["answer"]
    assert 0.6 < two_steps / 6000 < 0.8
    assert 0.57 < hasty / two_steps < 0.63


def test_heldout_responses_work_out_every_step(arithmetic: Path) -> None:
    for row in rows(arithmetic / "heldout.jsonl"):
        assert row["response"].endswith(f" #### {row['answer']}")
        assert row["response"].count("=") == len(numbers(row["prompt"])) - 1


@pytest.mark.parametrize(("kind", "problems"), [("preferences", "train"), ("heldout-preferences", "heldout")])
def test_the_chosen_answer_is_right_and_complete_and_the_rejected_one_is_not(
    kind: str, problems: str, arithmetic: Path
) -> None:
    kinds = {"wrong": 0, "hasty": 0, "unfinished": 0}
    pairs = rows(arithmetic / f"{kind}.jsonl")
    answers = {row["prompt"]: row["answer"] for row in rows(arithmetic / f"{problems}.jsonl")}
    assert list(answers) == list(dict.fromkeys(pair["prompt"] for pair in pairs))
    assert len({(pair["prompt"], pair["rejected"]) for pair in pairs}) == len(pairs)
    for pair in pairs:
        answer = answers[pair["prompt"]]
        count, *changes = numbers(pair["prompt"])
        steps = []
        for change in changes:
            steps.append(f"{count}{change:+d}={count + change}")
            count += change
        assert pair["chosen"] == f"{';'.join(steps)} #### {answer}"
        worked, marked, final = pair["rejected"].partition(" #### ")
        assert "-" not in re.sub(r"\d-", "", pair["rejected"])
        if not marked:
            kinds["unfinished"] += 1
            assert ";".join(steps).startswith(worked)
        elif len(steps) == 2 and worked == steps[0]:
            kinds["hasty"] += 1
            assert steps[0].endswith(f"={final}")
        else:
            kinds["wrong"] += 1
            assert worked.count("=") == len(steps)
            assert 1 <= abs(int(final) - int(answer)) <= 3
    assert all(count > 0.1 * len(pairs) for count in kinds.values()), kinds


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    a, b, c = (
        write_arithmetic(tmp_path / name, seed, num_train=50, num_heldout=10)
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    for kind in ("sft", "train", "heldout", "preferences", "heldout_preferences"):
        assert getattr(a, kind).read_bytes() == getattr(b, kind).read_bytes()
        assert getattr(a, kind).read_bytes() != getattr(c, kind).read_bytes()


def test_split_does_not_depend_on_the_seed() -> None:
    (train, _), (_, heldout) = make_problems(random.Random(1), 2000, 1), make_problems(random.Random(2), 1, 300)
    assert not {(p.start, p.changes) for p in train} & {(p.start, p.changes) for p in heldout}


def test_numbers_stay_small_and_counts_positive() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        problem = draw_problem(rng)
        assert 1 <= problem.start <= 9
        assert all(1 <= abs(c) <= 6 for c in problem.changes)
        assert min(problem.values) >= 1


def test_asking_for_too_many_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.data.demo_arithmetic.MAX_REPEATS", 50)
    monkeypatch.setattr("megarl.data.demo_arithmetic.NAMES", ("Ann",))
    monkeypatch.setattr("megarl.data.demo_arithmetic.THINGS", ("pens",))
    with pytest.raises(DataError, match=r"no further word problems after \d+ of 1000000 to train on"):
        make_problems(random.Random(0), 1_000_000, 1)
