"""Scores of the terms of a reward; functions of users; terms that fail: called once more, not replaced by a number."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt, ScoredGroup, Trajectory
from megarl.config.reward import PythonRewardConfig, RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward import math_equivalence, python_function, terms
from megarl.reward.python_function import PythonReward, load_reward
from megarl.reward.reward_scorer import RewardScorer
from megarl.reward.terms import FormatTerm
from tests.errors import expect_error
from tests.reward.conftest import make_scorer, make_trajectory
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS
from tests.virtual_time import run_in_virtual_time

HERE = __name__


def plus(trajectory: Any, text: str, row: Any) -> float:
    return len(text) + row["bonus"]


async def bonus(trajectory: Any, text: str, row: Any) -> float:
    await asyncio.sleep(0)
    return row["bonus"]


def numpy_number(trajectory: Any, text: str, row: Any) -> Any:
    return np.float32(trajectory.num_tokens)


def constant(value: Any) -> Callable[..., Any]:
    """Return a reward that returns the value, or raises it."""

    def reward(trajectory: Any, text: str, row: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return reward


boolean, nan, negative_infinity = constant(True), constant(float("nan")), constant(float("-inf"))
huge, large = constant(-1e300), constant(6e17)
string, none = constant("1.0"), constant(None)
without_reward, reserved = constant({"length": 1.0}), constant({"reward": 1.0, "failed": 2.0})
infinite_part = constant({"reward": 1.0, "length": float("inf")})
raises, exits = constant(ValueError("no such thing")), constant(SystemExit("bye"))
one_for_all, group_raises = constant([1.0]), constant(ConnectionError("no judge"))


class UserTimeout(BaseException):
    """As `math_verify.errors.TimeoutException` and `func_timeout.FunctionTimedOut`, no `Exception`."""


base_error, interrupt = constant(UserTimeout("3 s are over")), constant(KeyboardInterrupt())


async def base_error_async(trajectory: Any, text: str, row: Any) -> float:
    raise UserTimeout("3 s are over")


async def cancels_itself(trajectory: Any, text: str, row: Any) -> float:
    raise asyncio.CancelledError


class CannotBeCreated:
    def __init__(self) -> None:
        raise UserTimeout("no model")

    def score(self, trajectory: Any, text: str, row: Any) -> float:
        return 1.0


async def raises_async(trajectory: Any, text: str, row: Any) -> float:
    raise TimeoutError("the judge did not answer")


def slow(trajectory: Any, text: str, row: Any) -> float:
    threading.Event().wait()
    return 1.0


async def slow_async(trajectory: Any, text: str, row: Any) -> float:
    await asyncio.get_running_loop().create_future()
    return 1.0


ALL_THREADS = threading.Barrier(python_function.MAX_THREADS)


def meet(trajectory: Any, text: str, row: Any) -> float:
    """Return when all threads of the term call this."""
    ALL_THREADS.wait(HANG_SECONDS)
    return 1.0


def parts(trajectory: Any, text: str, row: Any, *, target: int = 4) -> Any:
    return {"reward": 1.0 if len(text) == target else 0.0, "length": len(text), "is_short": np.bool_(len(text) < 3)}


def picky(trajectory: Any, text: str, row: Any) -> float:
    if text == "bad":
        raise ValueError("I do not like it")
    return float(len(text))


def ranks(trajectories: Any, texts: list[str], row: Any) -> list[float]:
    """Return the rank of each completion by its length."""
    assert [t.num_tokens for t in trajectories] == [2 + len(text) for text in texts]
    return [float(sorted(map(len, texts)).index(len(text))) for text in texts]


async def best(trajectories: Any, texts: list[str], row: Any, *, margin: float) -> Any:
    await asyncio.sleep(0)
    longest = max(map(len, texts))
    return tuple({"reward": float(len(text) >= longest - margin), "gap": longest - len(text)} for text in texts)


def some(trajectories: Any, texts: list[str], row: Any) -> Any:
    return [None if text == "bad" else 1.0 for text in texts]


class Counting:
    """Counts its instances and calls, and records when it was closed."""

    instances: ClassVar[list[Counting]] = []

    def __init__(self, start: float = 0.0) -> None:
        self.value, self.is_closed = start, False
        Counting.instances.append(self)

    def score(self, trajectory: Any, text: str, row: Any) -> float:
        self.value += 1
        return self.value

    async def close(self) -> None:
        self.is_closed = True
        raise RuntimeError("too late")


async def score_one(scorer: RewardScorer, trajectory: Trajectory, prompt: Prompt) -> dict[str, float]:
    """Return the reward terms of one completion."""
    (scored,) = (await scorer.score([trajectory], prompt)).trajectories
    assert not scored.reward_errors
    return dict(scored.rewards)


def python(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "python", "path": f"{HERE}:{name}", "on_error": "raise", "timeout_seconds": UNREACHED_SECONDS, **fields
    }  # fmt: skip


def test_terms_before_weighting(prompt: Prompt) -> None:
    s = make_scorer(
        accuracy={"type": "numeric", "weight": 2.0},
        strict={"type": "numeric", "strict": True},
        format={"type": "format", "weight": -0.5},
        plus=python("plus", weight=0.1),
        bonus=python("bonus"),
        tokens=python("numpy_number", weight=0.0),
        boolean=python("boolean"),
    )
    rewards = asyncio.run(score_one(s, make_trajectory("so #### 72"), prompt))
    assert rewards == {
        "accuracy": 1.0, "strict": 1.0, "format": 1.0, "plus": 10.5, "bonus": 0.5, "tokens": 12.0, "boolean": 1.0
    }  # fmt: skip
    assert all(type(v) is float for v in rewards.values())


def test_strict_rewards_need_a_stop_token_and_no_text_of_the_prompt_counts(prompt: Prompt) -> None:
    s = make_scorer(accuracy={"type": "numeric"}, strict={"type": "numeric", "strict": True})
    unfinished = make_trajectory("#### 72", finish_reason="length")
    assert asyncio.run(score_one(s, unfinished, prompt)) == {"accuracy": 1.0, "strict": 0.0}
    wrong = make_trajectory("no idea", prompt="#### 72\n")
    assert asyncio.run(score_one(s, wrong, prompt)) == {"accuracy": 0.0, "strict": 0.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised ValueError: no such thing \(at .*test_reward_scorer.py:\d+\)"),
        ("raises_async", r"raised TimeoutError: the judge did not answer \(at .*test_reward_scorer.py:\d+\)"),
        ("exits", "raised SystemExit: bye"),
        ("base_error", r"raised UserTimeout: 3 s are over \(at .*test_reward_scorer.py:\d+\)"),
        ("base_error_async", r"raised UserTimeout: 3 s are over \(at .*test_reward_scorer.py:\d+\)"),
        ("interrupt", "raised KeyboardInterrupt: "),
        ("cancels_itself", "raised CancelledError: "),
        ("nan", "returned nan, not a finite number,"),
        ("negative_infinity", "returned -inf, not a finite number,"),
        ("huge", r"returned -1e\+300, a reward beyond 1e\+18,"),
        ("string", "returned str '1.0', not a number,"),
        ("none", "returned NoneType None, not a number,"),
        ("without_reward", r"returned a mapping without the key 'reward', but \['length'\],"),
        ("reserved", r"needs .* keys are strings other than failed, .*, got \['reward', 'failed'\],"),
        ("infinite_part", "returned inf for 'length', not a finite number,"),
        ("slow", "took longer than timeout_seconds = 0.05"),
        ("slow_async", "took longer than timeout_seconds = 0.05"),
    ],
)
def test_failing_function_is_named_with_prompt_and_completion(prompt: Prompt, name: str, message: str) -> None:
    s = make_scorer(mine=python(name, **({"timeout_seconds": 0.05} if name.startswith("slow") else {})))
    head = rf"^reward.terms.mine \(tests.reward.test_reward_scorer:{name}\) {message}"
    with pytest.raises(RewardError, match=rf"{head}.* on train.jsonl:7, completion 'so it is'$") as caught:
        asyncio.run(score_one(s, make_trajectory("so it is"), prompt))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", ["base_error", "base_error_async", "cancels_itself"])
def test_errors_that_are_no_exceptions_are_dropped_like_others(prompt: Prompt, name: str) -> None:
    scorer = make_scorer(mine=python(name, on_error="drop"))
    (scored,) = run_in_virtual_time(scorer.score([make_trajectory("so")], prompt)).trajectories
    assert "raised" in scored.reward_errors["mine"]
    with expect_error(RewardError, "reward.terms.mine", "UserTimeout"):
        make_scorer(mine=python("CannotBeCreated"))


def test_long_completion_is_shortened_in_errors(prompt: Prompt) -> None:
    with pytest.raises(RewardError) as caught:
        asyncio.run(score_one(make_scorer(mine=python("raises")), make_trajectory("a" * 10_000 + "z"), prompt))
    assert len(str(caught.value)) < 700
    assert "aaa ... aaa" in str(caught.value)
    assert str(caught.value).endswith("az'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("#### 72", 1.0), (r"so \boxed{x+1}", 1.0), (r"so \boxed{1+x}", 1.0), ("#### 7", 0.0), (r"so \boxed{x+2}", 0.0)],
)
def test_one_of_several_answers_is_enough(text: str, expected: float) -> None:
    prompt = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1", other_answers=("72", "seventy-two"))
    scorer = make_scorer(math={"type": "math"}, numeric={"type": "numeric"})
    found = asyncio.run(score_one(scorer, make_trajectory(text), prompt))
    assert found["math"] == expected
    assert found["numeric"] == (expected if "1+x" not in text else 0.0), "numeric compares expressions as texts"


def test_missing_reference_answer_raises(prompt: Prompt) -> None:
    without = Prompt(prompt_id="train.jsonl:9", text="Q?", token_ids=(1,), row={})
    with expect_error(RewardError, "reward.terms.acc", "train.jsonl:9"):
        asyncio.run(score_one(make_scorer(acc={"type": "numeric"}), make_trajectory("#### 1"), without))


def test_invalid_terms_name_their_yaml_path() -> None:
    with expect_error(ConfigError, "reward.terms.f.pattern", "'('"):
        make_scorer(f={"type": "format", "pattern": "("})
    with expect_error(ConfigError, "reward.terms.g.path", "'absent'"):
        make_scorer(g=python("absent"))


def test_algebra_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_went_on = threading.Event()
    monkeypatch.setattr(terms, "compare", lambda *_: "equal" if loop_went_on.wait(HANG_SECONDS) else "unequal")
    prompt = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1")

    async def score() -> float:
        accuracy, trajectory = make_scorer(accuracy={"type": "math"}), make_trajectory(r"so \boxed{1+x}")
        scoring = asyncio.create_task(score_one(accuracy, trajectory, prompt))
        await asyncio.sleep(0.01)
        loop_went_on.set()
        return (await scoring)["accuracy"]

    assert asyncio.run(score()) == 1.0


def test_sync_functions_run_concurrently(prompt: Prompt) -> None:
    num = python_function.MAX_THREADS
    assert [t.rewards["meet"] for t in score_texts(make_scorer(meet=python("meet")), prompt, *["x"] * num)] == [
        1.0
    ] * num


def test_hung_function_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\ndef f(t, text, row): time.sleep(6000)\n")
    code = (
        f"import asyncio, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.reward.conftest import *\n"
        "term = {'type': 'python', 'path': 'hanging:f', 'timeout_seconds': 0.1, 'on_error': 'raise'}\n"
        "p = Prompt(prompt_id='a:1', text='', token_ids=(), row={})\n"
        "asyncio.run(make_scorer(h=term).score([make_trajectory('x')], p))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert "took longer than timeout_seconds = 0.1" in done.stderr


def test_scorer_decodes_with_the_models_tokenizer(tmp_path: Path) -> None:
    from megarl.data.tiny_checkpoint import write_tiny_model
    from megarl.data.tokenizer import load_tokenizer

    write_tiny_model(tmp_path, ["8+3=11 #### 11"], seed=0)
    tokenizer = load_tokenizer(tmp_path)
    ids = [*tokenizer("8+3=11 , isn 't #### 11")["input_ids"], tokenizer.eos_token_id]
    trajectory = make_trajectory("".join(map(chr, ids)), prompt="")
    spaces = {"type": "format", "pattern": r"^8\+3=11 , isn 't"}
    config = RewardsConfig.model_validate({"terms": {"a": {"type": "numeric", "strict": True}, "spaces": spaces}})
    prompt = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="11")
    rewards = asyncio.run(score_one(RewardScorer.from_tokenizer(config, tokenizer), trajectory, prompt))
    assert rewards == {"a": 1.0, "spaces": 1.0}


def test_model_terms_are_skipped() -> None:
    terms = {"rm": {"type": "model", "path": "nowhere", "weight": 2.0}, "f": {"type": "format", "pattern": "."}}
    for given, expected in ((terms, {"f": 1.0}), ({"rm": terms["rm"]}, {})):
        prompt = Prompt(prompt_id="p", text="", token_ids=(), row={})
        assert asyncio.run(score_one(make_scorer(**given), make_trajectory("yes"), prompt)) == expected


def score_texts(s: RewardScorer, prompt: Prompt, *texts: str) -> list[Trajectory]:
    return asyncio.run(s.score([make_trajectory(text) for text in texts], prompt)).trajectories


def test_sub_metrics_are_logged_beside_their_term(prompt: Prompt) -> None:
    s = make_scorer(parts=python("parts", weight=2.0, kwargs={"target": 2}), plus=python("plus"))
    first, second = score_texts(s, prompt, "ab", "abcd")
    assert first.rewards == {"parts": 1.0, "parts/length": 2.0, "parts/is_short": 1.0, "plus": 2.5}
    assert second.rewards == {"parts": 0.0, "parts/length": 4.0, "parts/is_short": 0.0, "plus": 4.5}


def test_group_rewards_see_all_completions_of_the_prompt(prompt: Prompt) -> None:
    s = make_scorer(
        ranks=python("ranks", per="group"), best=python("best", per="group", kwargs={"margin": 1}, weight=10.0)
    )
    scored = score_texts(s, prompt, "abc", "a", "ab")
    assert [t.rewards["ranks"] for t in scored] == [2.0, 0.0, 1.0]
    assert [t.rewards["best/gap"] for t in scored] == [0.0, 2.0, 1.0]
    assert [t.rewards["best"] for t in scored] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_for_all", r"returned list \[1.0\], not a sequence of 2 results, on the 2 completions of train.jsonl:7$"),
        ("some", "returned NoneType None, not a number, on train.jsonl:7, completion 'bad'$"),
        ("group_raises", r"raised ConnectionError: no judge \(at .*\) on the 2 completions of train.jsonl:7$"),
    ],
)
def test_failing_group_reward_is_named(prompt: Prompt, name: str, message: str) -> None:
    s = make_scorer(mine=python(name, per="group"))
    with pytest.raises(RewardError, match=rf"^reward.terms.mine \(tests.reward.test_reward_scorer:{name}\) {message}"):
        score_texts(s, prompt, "good", "bad")


def test_failed_completions_are_dropped_if_the_term_says_so(prompt: Prompt) -> None:
    s = make_scorer(picky=python("picky", on_error="drop"), plus=python("plus"))
    good, bad, other = score_texts(s, prompt, "good", "bad", "x")
    assert (good.rewards, good.reward_errors) == ({"picky": 4.0, "plus": 4.5}, {})
    assert (other.rewards, other.reward_errors) == ({"picky": 1.0, "plus": 1.5}, {})
    assert bad.rewards == {"plus": 3.5}
    assert bad.reward_errors.keys() == {"picky"}
    assert "raised ValueError: I do not like it" in bad.reward_errors["picky"]
    raising = make_scorer(picky=python("picky", on_error="raise"), plus=python("plus", on_error="drop"))
    with expect_error(RewardError, "I"):
        score_texts(raising, prompt, "good", "bad")


@pytest.mark.parametrize(("name", "dropped"), [("some", [False, True]), ("group_raises", [True, True])])
def test_group_reward_drops_the_completions_without_a_result(prompt: Prompt, name: str, dropped: list[bool]) -> None:
    scored = score_texts(make_scorer(mine=python(name, per="group", on_error="drop")), prompt, "good", "bad")
    assert [bool(t.reward_errors) for t in scored] == dropped


def test_a_class_is_created_once_and_closed(prompt: Prompt, caplog: pytest.LogCaptureFixture) -> None:
    Counting.instances.clear()
    s = make_scorer(counter=python("Counting", kwargs={"start": 5.0}))
    assert [t.rewards["counter"] for t in score_texts(s, prompt, "a", "b", "c")] == [6.0, 7.0, 8.0]
    (counter,) = Counting.instances
    assert not counter.is_closed
    asyncio.run(s.close())
    assert counter.is_closed
    assert f"reward.terms.counter ({HERE}:Counting): close() raised RuntimeError: too late" in caplog.text


BACKTRACKING = {"type": "format", "pattern": "(a|aa)+$", "timeout_seconds": 0.1}


def test_backtracking_pattern_does_not_block_the_event_loop(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    search, ticks, ticks_of_search = FormatTerm.search, itertools.count(), queue.SimpleQueue[int]()

    def count_ticks(term: FormatTerm, text: str, *, timeout: float, concurrent: bool = False) -> float:
        before = next(ticks)
        try:
            return search(term, text, timeout=timeout, concurrent=concurrent)
        finally:
            if concurrent:
                ticks_of_search.put(next(ticks) - before)

    async def score_and_tick() -> list[Trajectory]:
        s = make_scorer(shape=BACKTRACKING)
        scoring = asyncio.create_task(s.score([make_trajectory("a" * 100 + "!"), make_trajectory("aa")], prompt))
        while not scoring.done():
            await asyncio.sleep(0)
            next(ticks)
        return (await scoring).trajectories

    monkeypatch.setattr(FormatTerm, "search", count_ticks)
    hanging, good = asyncio.run(score_and_tick())
    assert hanging.reward_errors.keys() == {"shape"}
    assert "took longer than timeout_seconds = 0.1 on train.jsonl:7" in hanging.reward_errors["shape"]
    assert (good.rewards, good.reward_errors) == ({"shape": 1.0}, {})
    assert ticks_of_search.get(timeout=HANG_SECONDS) > 10
    with expect_error(RewardError, "reward.terms.shape", "timeout_seconds = 0.1"):
        score_texts(make_scorer(shape=BACKTRACKING | {"on_error": "raise"}), prompt, "a" * 100 + "!")


def test_undecided_comparison_is_a_zero_with_a_metric_of_its_own() -> None:
    algebra = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1")
    scorer = make_scorer(acc={"type": "math", "timeout_seconds": UNREACHED_SECONDS})
    good, tower, wrong = score_texts(scorer, algebra, r"\boxed{1+x}", r"\boxed{9^{9^{9^9}}}", "#### x")
    assert [each.rewards for each in (good, tower, wrong)] == [
        {"acc": 1.0, "acc/undecided": 0.0},
        {"acc": 0.0, "acc/undecided": 1.0},
        {"acc": 0.0, "acc/undecided": 0.0},
    ]
    assert not any(each.reward_errors for each in (good, tower, wrong))


def test_reference_that_cannot_be_compared_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(prediction: str, reference: str, cpu_seconds: float, timeout_seconds: float) -> str:
        raise failure(f"the reference answer takes more than cpu_seconds = {cpu_seconds:g}")

    failure: type[Exception] = math_equivalence.EquivalenceError
    monkeypatch.setattr(terms, "compare", check)
    algebra = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1")
    good, bad = score_texts(make_scorer(acc={"type": "math"}), algebra, "#### x+1", r"\boxed{1+x}")
    assert (good.rewards["acc"], good.reward_errors) == (1.0, {})
    error = r"the reference answer takes more than cpu_seconds = 1 on a:1, completion '\\boxed{1+x}'"
    assert bad.reward_errors == {"acc": f"reward.terms.acc (math): {error}"}
    raising = make_scorer(acc={"type": "math", "on_error": "raise", "cpu_seconds": 0.5})
    with expect_error(RewardError, "cpu_seconds = 0.5"):
        score_texts(raising, algebra, r"\boxed{1+x}")
    failure = RewardError  # as without sympy, which ends the run even if failures are dropped
    with pytest.raises(RewardError, match="cpu_seconds"):
        score_texts(make_scorer(acc={"type": "math", "on_error": "drop"}), algebra, r"\boxed{1+x}")


def test_a_reward_that_keeps_hanging_ends_the_run(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_function, "MAX_THREADS", 4)
    s = make_scorer(slow=python("slow", on_error="drop", timeout_seconds=0.05))
    scored = score_texts(s, prompt, "a", "b")
    assert all("took longer" in t.reward_errors["slow"] for t in scored)
    with expect_error(RewardError, "reward.terms.slow", "4"):
        score_texts(s, prompt, "c")


@pytest.mark.parametrize("name", ["mean", "dropped", "a/b"])
def test_term_names_cannot_be_those_of_other_metrics(name: str) -> None:
    with pytest.raises(ValueError, match=rf"a term needs a name without / that is none of .*, got '{name}'"):
        make_scorer(**{name: {"type": "numeric"}})


TIMEOUT = 0.2

FAILURES = {
    "raises": ConnectionError("the service is down"),
    "nan": float("nan"),
    "infinite": {"reward": float("inf")},
    "nothing": None,
    "hangs": "hang",
}
"""By a completion's first word: what goes wrong."""


class Service:
    """Fails on a completion `<failure> <number>` in its first `<number>` calls, and then returns its length."""

    calls: ClassVar[Counter[str]] = Counter()

    async def score(self, trajectory: Any, text: str, row: Any) -> Any:
        self.calls[text] += 1
        kind, num_failures = text.split()
        if self.calls[text] <= int(num_failures):
            failure = FAILURES[kind]
            if isinstance(failure, Exception):
                raise failure
            if failure == "hang":
                await asyncio.sleep(10 * TIMEOUT)
            return failure
        return float(len(text))


class GroupService:
    """Sees all completions of a prompt; fails on all of them in its first call, or on the texts in `bad`."""

    calls: ClassVar[list[list[str]]] = []
    bad: ClassVar[list[list[str]]] = []

    async def score(self, trajectories: Any, texts: list[str], row: Any) -> Any:
        self.calls.append(list(texts))
        bad = self.bad[len(self.calls) - 1]
        if bad == ["all"]:
            raise ConnectionError("the service is down")
        return [None if text in bad else float(len(text)) + 100 * len(self.calls) for text in texts]


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    Service.calls.clear()
    GroupService.calls.clear()


def score_service(prompt: Prompt, texts: Sequence[str], path: str = "Service", **fields: Any) -> ScoredGroup:
    term = {"type": "python", "path": f"{__name__}:{path}", "timeout_seconds": TIMEOUT, **fields}
    scorer = make_scorer(service=term)
    return run_in_virtual_time(scorer.score([make_trajectory(text) for text in texts], prompt))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_completion_is_scored_once_more(prompt: Prompt, failure: str) -> None:
    scored = score_service(prompt, [f"{failure} 0", f"{failure} 1"])
    assert [t.reward_errors for t in scored.trajectories] == [{}, {}]
    assert [t.rewards["service"] for t in scored.trajectories] == [len(failure) + 2.0] * 2
    assert Service.calls == {f"{failure} 0": 1, f"{failure} 1": 2}, "only the failed one is called again"
    assert scored.terms["service"].num_retried == 1


@pytest.mark.parametrize("failure", FAILURES)
def test_a_completion_that_fails_twice_has_an_error_and_no_value(prompt: Prompt, failure: str) -> None:
    good, bad = score_service(prompt, [f"{failure} 0", f"{failure} 2"]).trajectories
    assert (good.rewards, good.reward_errors) == ({"service": len(failure) + 2.0}, {})
    assert (bad.rewards, set(bad.reward_errors)) == ({}, {"service"})
    assert bad.reward_errors["service"].startswith(f"reward.terms.service ({__name__}:Service) ")
    assert Service.calls[f"{failure} 2"] == 2
    with pytest.raises(RewardError, match=r"^reward.terms.service "):
        score_service(prompt, [f"{failure} 4"], on_error="raise")


def test_a_term_that_compares_completions_sees_all_of_them_again(prompt: Prompt) -> None:
    GroupService.bad = [["a"], []]
    scored = score_service(prompt, ["a", "bb", "ccc"], "GroupService", per="group")
    assert GroupService.calls == [["a", "bb", "ccc"]] * 2
    assert [t.rewards["service"] for t in scored.trajectories] == [201.0, 102.0, 103.0], "values of the first call stay"
    assert scored.terms["service"].num_retried == 1


def test_a_group_that_fails_twice_has_no_values(prompt: Prompt) -> None:
    GroupService.bad = [["all"], ["all"]]
    scored = score_service(prompt, ["a", "bb"], "GroupService", per="group")
    assert all("the service is down" in t.reward_errors["service"] for t in scored.trajectories)
    assert len(GroupService.calls) == 2


def test_seconds_of_a_term_include_its_second_call(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: asyncio.get_running_loop().time())
    assert score_service(prompt, ["hangs 0", "hangs 2"]).terms["service"].seconds == pytest.approx(2 * TIMEOUT)
    assert score_service(prompt, ["raises 0"]).terms["service"].num_retried == 0


KEY = "reward.terms.mine"


def load(path: str, **fields: Any) -> PythonReward:
    return load_reward(PythonRewardConfig(type="python", path=path, **fields), key=KEY)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary working directory; its modules are unloaded after the test."""
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_functions_from_the_working_directory(folder: Path) -> None:
    (folder / "my_rewards.py").write_text(
        "def f(trajectory, text, row): return 1.0\n"
        "async def g(trajectory, text, row, extra=0): return 2.0\n"
        "class H:\n    async def __call__(self, trajectory, text, row): return 3.0\n"
        "h = H()\n"
    )
    assert load("my_rewards:f").function(None, "", {}) == 1.0
    assert [load(f"my_rewards:{n}").is_async for n in "fgh"] == [False, True, True]


CLASS = """
class Judge:
    created = 0
    def __init__(self, url, *, retries=3):
        Judge.created += 1
        self.url, self.retries, self.is_closed = url, retries, False
    async def score(self, trajectory, text, row):
        return self.retries
    def close(self):
        self.is_closed = True
class Group:
    @staticmethod
    def score(trajectories, texts, row):
        return [0.0] * len(texts)
class Broken:
    def __init__(self):
        raise OSError("no such host")
    def score(self, trajectory, text, row): ...
class NoScore: ...
class ShortScore:
    def score(self, text): ...
def with_options(trajectory, text, row, *, low, high=1.0): return (low, high)
def with_any(trajectory, text, row, **options): return options
"""


def test_kwargs_are_passed_to_functions_and_classes(folder: Path) -> None:
    (folder / "my_rewards.py").write_text(CLASS)
    assert load("my_rewards:with_options", kwargs={"low": 0.2}).function(None, "", {}) == (0.2, 1.0)
    assert load("my_rewards:with_any", kwargs={"a": [1]}).function(None, "", {}) == {"a": [1]}
    judge = load("my_rewards:Judge", kwargs={"url": "http://localhost"})
    assert judge.is_async
    instance = judge.function.__self__  # type: ignore[attr-defined]
    assert (instance.url, instance.retries, type(instance).created) == ("http://localhost", 3, 1)
    assert judge.close is not None
    judge.close()
    assert instance.is_closed
    group = load("my_rewards:Group", per="group")
    assert (group.is_async, group.close, group.function([], ["a", "b"], {})) == (False, None, [0.0, 0.0])
    message = rf"^{KEY} \(my_rewards:Broken\) cannot be created: OSError: no such host \(at .*my_rewards.py:\d+\)$"
    with pytest.raises(RewardError, match=message):
        load("my_rewards:Broken")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("with_options", {}, ".kwargs: my_rewards:with_options needs a value for 'low', which has no default"),
        ("with_options", {"kwargs": {"low": 1, "no": 2}}, ".kwargs: my_rewards:with_options has no option 'no', it"),
        ("Group", {"kwargs": {"a": 1}}, ".kwargs: my_rewards:Group has no option 'a', it has none"),
        ("Judge", {}, ".kwargs: my_rewards:Judge needs a value for 'url', which has no default"),
        ("NoScore", {}, ".path needs a class with a method score(trajectory, text, row), my_rewards:NoScore has none"),
        ("ShortScore", {"per": "group"}, ".path needs a function of (self, trajectories, texts, row), got my_rewards:"),
    ],
)
def test_signatures_are_checked(folder: Path, name: str, fields: dict[str, Any], message: str) -> None:
    (folder / "my_rewards.py").write_text(CLASS)
    with pytest.raises(ConfigError, match="^" + re.escape(KEY + message)):
        load(f"my_rewards:{name}", **fields)


def test_working_directory_does_not_shadow_installed_modules(folder: Path) -> None:
    (folder / "colorsys.py").write_text("def rgb_to_hls(trajectory, text, row): return 99.0")
    (folder / "my_rewards.py").write_text("def f(trajectory, text, row): return 1.0")
    load("my_rewards:f")  # puts the folder on the path
    sys.modules.pop("colorsys", None)
    assert load("colorsys:rgb_to_hls").function(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards", "needs package.module:function, got 'my_rewards'"),
        ("my_rewards:", "needs package.module:function"),
        (":f", "needs package.module:function"),
        ("nowhere.at_all:f", "cannot import nowhere.at_all: No module named 'nowhere'"),
        ("my_rewards:missing", "module my_rewards .* has no 'missing'"),
        ("my_rewards:number", r"needs a function or a class, got my_rewards:number = 3"),
        ("my_rewards:two", r"needs a function of \(trajectory, text, row\), got my_rewards:two\(a, b\)"),
        ("my_rewards:four", "my_rewards:four needs a value for 'd', which has no default"),
        ("broken:f", r"importing broken raised NameError: name 'undefined' is not defined \(at .*broken.py:1\)"),
        ("leaves:f", r"importing leaves raised SystemExit: 0 \(at .*leaves.py:1\)"),
        ("syntax:f", "importing syntax raised SyntaxError"),
        ("lacks:f", "cannot import lacks: No module named 'not_installed_here'"),
    ],
)
def test_errors_of_functions_name_the_yaml_path(folder: Path, path: str, message: str) -> None:
    (folder / "my_rewards.py").write_text("number = 3\ndef two(a, b): ...\ndef four(a, b, c, d): ...\n")
    (folder / "broken.py").write_text("undefined")
    (folder / "leaves.py").write_text("raise SystemExit(0)")
    (folder / "syntax.py").write_text("def f(:")
    (folder / "lacks.py").write_text("import not_installed_here")
    with pytest.raises(ConfigError, match=rf"^{KEY}.*{message}"):
        load(path)
