from __future__ import annotations

import asyncio
import itertools
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward import math_equivalence, python_term, rules
from megarl.reward.reward_scorer import RewardScorer
from megarl.reward.terms import FormatTerm
from tests.reward.conftest import decode, make_trajectory
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

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
string, none = constant("1.0"), constant(None)
without_reward, reserved = constant({"length": 1.0}), constant({"reward": 1.0, "failed": 2.0})
infinite_part = constant({"reward": 1.0, "length": float("inf")})
raises, exits = constant(ValueError("no such thing")), constant(SystemExit("bye"))
one_for_all, group_raises = constant([1.0]), constant(ConnectionError("no judge"))


async def raises_async(trajectory: Any, text: str, row: Any) -> float:
    raise TimeoutError("the judge did not answer")


def slow(trajectory: Any, text: str, row: Any) -> float:
    threading.Event().wait()
    return 1.0


async def slow_async(trajectory: Any, text: str, row: Any) -> float:
    await asyncio.get_running_loop().create_future()
    return 1.0


ALL_THREADS = threading.Barrier(python_term.MAX_THREADS)


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


class Counter:
    """Counts its instances and calls, and records when it was closed."""

    instances: ClassVar[list[Counter]] = []

    def __init__(self, start: float = 0.0) -> None:
        self.value, self.is_closed = start, False
        Counter.instances.append(self)

    def score(self, trajectory: Any, text: str, row: Any) -> float:
        self.value += 1
        return self.value

    async def close(self) -> None:
        self.is_closed = True
        raise RuntimeError("too late")


async def score_one(scorer: RewardScorer, trajectory: Trajectory, prompt: Prompt) -> tuple[dict[str, float], float]:
    """Return the reward terms and the reward of one completion."""
    (scored,) = (await scorer.score([trajectory], prompt)).trajectories
    assert not scored.reward_errors
    return dict(scored.rewards), scored.reward


def scorer(**terms: dict[str, Any]) -> RewardScorer:
    return RewardScorer(RewardsConfig.model_validate({"terms": terms}), decode)


def python(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "python", "path": f"{HERE}:{name}", "on_error": "raise", "timeout_seconds": UNREACHED_SECONDS, **fields
    }  # fmt: skip


def test_terms_and_their_weighted_sum(prompt: Prompt) -> None:
    s = scorer(
        accuracy={"type": "numeric", "weight": 2.0},
        strict={"type": "numeric", "strict": True},
        format={"type": "format", "weight": -0.5},
        plus=python("plus", weight=0.1),
        bonus=python("bonus"),
        tokens=python("numpy_number", weight=0.0),
        boolean=python("boolean"),
    )
    rewards, total = asyncio.run(score_one(s, make_trajectory("so #### 72"), prompt))
    assert rewards == {
        "accuracy": 1.0, "strict": 1.0, "format": 1.0, "plus": 10.5, "bonus": 0.5, "tokens": 12.0, "boolean": 1.0
    }  # fmt: skip
    assert total == pytest.approx(2.0 + 1.0 - 0.5 + 1.05 + 0.5 + 1.0)
    assert all(type(v) is float for v in rewards.values())


def test_strict_rewards_need_a_stop_token_and_no_text_of_the_prompt_counts(prompt: Prompt) -> None:
    s = scorer(accuracy={"type": "numeric"}, strict={"type": "numeric", "strict": True})
    unfinished = make_trajectory("#### 72", finish_reason="length")
    assert asyncio.run(score_one(s, unfinished, prompt)) == ({"accuracy": 1.0, "strict": 0.0}, 1.0)
    wrong = make_trajectory("no idea", prompt="#### 72\n")
    assert asyncio.run(score_one(s, wrong, prompt)) == ({"accuracy": 0.0, "strict": 0.0}, 0.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised ValueError: no such thing \(at .*test_reward_scorer.py:\d+\)"),
        ("raises_async", r"raised TimeoutError: the judge did not answer \(at .*test_reward_scorer.py:\d+\)"),
        ("exits", "raised SystemExit: bye"),
        ("nan", "returned nan, not a finite number,"),
        ("negative_infinity", "returned -inf, not a finite number,"),
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
    s = scorer(mine=python(name, **({"timeout_seconds": 0.05} if name.startswith("slow") else {})))
    head = rf"^reward.terms.mine \(tests.reward.test_reward_scorer:{name}\) {message}"
    with pytest.raises(RewardError, match=rf"{head}.* on train.jsonl:7, completion 'so it is'$") as caught:
        asyncio.run(score_one(s, make_trajectory("so it is"), prompt))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_long_completion_is_shortened_in_errors(prompt: Prompt) -> None:
    with pytest.raises(RewardError) as caught:
        asyncio.run(score_one(scorer(mine=python("raises")), make_trajectory("a" * 10_000 + "z"), prompt))
    assert len(str(caught.value)) < 700
    assert "aaa ... aaa" in str(caught.value)
    assert str(caught.value).endswith("az'")


def test_missing_reference_answer_raises(prompt: Prompt) -> None:
    without = Prompt(prompt_id="train.jsonl:9", text="Q?", token_ids=(1,), row={})
    with pytest.raises(RewardError, match=r"reward.terms.acc \(numeric\) needs a reference answer .*train.jsonl:9"):
        asyncio.run(score_one(scorer(acc={"type": "numeric"}), make_trajectory("#### 1"), without))


def test_invalid_terms_name_their_yaml_path() -> None:
    with pytest.raises(ConfigError, match=r"^reward.terms.f.pattern: needs a regular expression, got '\('"):
        scorer(f={"type": "format", "pattern": "("})
    with pytest.raises(ConfigError, match=r"^reward.terms.g.path: module .* has no 'absent'"):
        scorer(g=python("absent"))


def test_math_verify_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_went_on = threading.Event()
    monkeypatch.setattr(rules, "is_equivalent", lambda *_: loop_went_on.wait(HANG_SECONDS))
    prompt = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1")

    async def score() -> float:
        scoring = asyncio.create_task(
            score_one(scorer(accuracy={"type": "numeric"}), make_trajectory(r"so \boxed{1+x}"), prompt)
        )
        await asyncio.sleep(0.01)
        loop_went_on.set()
        return (await scoring)[1]

    assert asyncio.run(score()) == 1.0


def test_sync_functions_run_concurrently(prompt: Prompt) -> None:
    num = python_term.MAX_THREADS
    assert [t.reward for t in score_texts(scorer(meet=python("meet")), prompt, *["x"] * num)] == [1.0] * num


def test_hung_function_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\ndef f(t, text, row): time.sleep(6000)\n")
    code = (
        "import asyncio\n"
        "from megarl.config.reward import RewardsConfig\n"
        "from megarl.reward.reward_scorer import RewardScorer\n"
        "from tests.reward.conftest import *\n"
        "term = {'type': 'python', 'path': 'hanging:f', 'timeout_seconds': 0.1, 'on_error': 'raise'}\n"
        "c = RewardsConfig.model_validate({'terms': {'h': term}})\n"
        "p = Prompt(prompt_id='a:1', text='', token_ids=(), row={})\n"
        "asyncio.run(RewardScorer(c, decode).score([make_trajectory('x')], p))\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
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
    rewards, _ = asyncio.run(score_one(RewardScorer.from_model(config, str(tmp_path)), trajectory, prompt))
    assert rewards == {"a": 1.0, "spaces": 1.0}


def test_model_terms_are_skipped() -> None:
    terms = {"rm": {"type": "model", "path": "nowhere", "weight": 2.0}, "f": {"type": "format", "pattern": "."}}
    for config, expected in ((terms, ({"f": 1.0}, 1.0)), ({"rm": terms["rm"]}, ({}, 0.0))):
        scorer = RewardScorer(RewardsConfig.model_validate({"terms": config}), decode)
        prompt = Prompt(prompt_id="p", text="", token_ids=(), row={})
        assert asyncio.run(score_one(scorer, make_trajectory("yes"), prompt)) == expected


def score_texts(s: RewardScorer, prompt: Prompt, *texts: str) -> list[Trajectory]:
    return asyncio.run(s.score([make_trajectory(text) for text in texts], prompt)).trajectories


def test_sub_metrics_are_logged_beside_their_term(prompt: Prompt) -> None:
    s = scorer(parts=python("parts", weight=2.0, kwargs={"target": 2}), plus=python("plus"))
    first, second = score_texts(s, prompt, "ab", "abcd")
    assert first.rewards == {"parts": 1.0, "parts/length": 2.0, "parts/is_short": 1.0, "plus": 2.5}
    assert (first.reward, second.reward) == (4.5, 4.5)
    assert second.rewards == {"parts": 0.0, "parts/length": 4.0, "parts/is_short": 0.0, "plus": 4.5}


def test_group_rewards_see_all_completions_of_the_prompt(prompt: Prompt) -> None:
    s = scorer(ranks=python("ranks", per="group"), best=python("best", per="group", kwargs={"margin": 1}, weight=10.0))
    scored = score_texts(s, prompt, "abc", "a", "ab")
    assert [t.rewards["ranks"] for t in scored] == [2.0, 0.0, 1.0]
    assert [t.rewards["best/gap"] for t in scored] == [0.0, 2.0, 1.0]
    assert [t.reward for t in scored] == [12.0, 0.0, 11.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_for_all", r"returned list \[1.0\], not a sequence of 2 results, on the 2 completions of train.jsonl:7$"),
        ("some", "returned NoneType None, not a number, on train.jsonl:7, completion 'bad'$"),
        ("group_raises", r"raised ConnectionError: no judge \(at .*\) on the 2 completions of train.jsonl:7$"),
    ],
)
def test_failing_group_reward_is_named(prompt: Prompt, name: str, message: str) -> None:
    s = scorer(mine=python(name, per="group"))
    with pytest.raises(RewardError, match=rf"^reward.terms.mine \(tests.reward.test_reward_scorer:{name}\) {message}"):
        score_texts(s, prompt, "good", "bad")


def test_failed_completions_are_dropped_if_the_term_says_so(prompt: Prompt) -> None:
    s = scorer(picky=python("picky", on_error="drop"), plus=python("plus"))
    good, bad, other = score_texts(s, prompt, "good", "bad", "x")
    assert (good.rewards, good.reward, good.reward_errors) == ({"picky": 4.0, "plus": 4.5}, 8.5, {})
    assert (other.reward, other.reward_errors) == (2.5, {})
    assert (bad.rewards, bad.reward) == ({"plus": 3.5}, 0.0)
    assert bad.reward_errors.keys() == {"picky"}
    assert "raised ValueError: I do not like it" in bad.reward_errors["picky"]
    raising = scorer(picky=python("picky", on_error="raise"), plus=python("plus", on_error="drop"))
    with pytest.raises(RewardError, match="I do not like it"):
        score_texts(raising, prompt, "good", "bad")


@pytest.mark.parametrize(("name", "dropped"), [("some", [False, True]), ("group_raises", [True, True])])
def test_group_reward_drops_the_completions_without_a_result(prompt: Prompt, name: str, dropped: list[bool]) -> None:
    scored = score_texts(scorer(mine=python(name, per="group", on_error="drop")), prompt, "good", "bad")
    assert [bool(t.reward_errors) for t in scored] == dropped


def test_a_class_is_created_once_and_closed(prompt: Prompt, caplog: pytest.LogCaptureFixture) -> None:
    Counter.instances.clear()
    s = scorer(counter=python("Counter", kwargs={"start": 5.0}))
    assert [t.reward for t in score_texts(s, prompt, "a", "b", "c")] == [6.0, 7.0, 8.0]
    (counter,) = Counter.instances
    assert not counter.is_closed
    asyncio.run(s.close())
    assert counter.is_closed
    assert "reward.terms.counter (tests.reward.test_reward_scorer:Counter): close() raised RuntimeError: too late" in (
        caplog.text
    )


BACKTRACKING = {"type": "format", "pattern": "(a|aa)+$", "timeout_seconds": 0.1}


def test_backtracking_pattern_times_out_without_blocking_the_event_loop(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, ticks, ticks_of_search = FormatTerm._search, itertools.count(), queue.SimpleQueue[int]()

    def count_ticks(term: FormatTerm, text: str, *, timeout: float, concurrent: bool = False) -> float:
        before = next(ticks)
        try:
            return search(term, text, timeout=timeout, concurrent=concurrent)
        finally:
            if concurrent:
                ticks_of_search.put(next(ticks) - before)

    async def score_and_tick() -> list[Trajectory]:
        s = scorer(shape=BACKTRACKING)
        scoring = asyncio.create_task(s.score([make_trajectory("a" * 100 + "!"), make_trajectory("aa")], prompt))
        while not scoring.done():
            await asyncio.sleep(0)
            next(ticks)
        return (await scoring).trajectories

    monkeypatch.setattr(FormatTerm, "_search", count_ticks)
    hanging, good = asyncio.run(score_and_tick())
    assert hanging.reward_errors.keys() == {"shape"}
    assert "took longer than timeout_seconds = 0.1 on train.jsonl:7" in hanging.reward_errors["shape"]
    assert (good.reward, good.reward_errors) == (1.0, {})
    assert ticks_of_search.get(timeout=HANG_SECONDS) > 10
    with pytest.raises(RewardError, match=r"^reward.terms.shape \(format\) took longer than timeout_seconds = 0.1"):
        score_texts(scorer(shape=BACKTRACKING | {"on_error": "raise"}), prompt, "a" * 100 + "!")


def test_undecided_equivalence_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(prediction: str, reference: str, timeout_seconds: float) -> bool:
        raise failure(f"math-verify took longer than timeout_seconds = {timeout_seconds:g}")

    failure: type[Exception] = math_equivalence.EquivalenceError
    monkeypatch.setattr(rules, "is_equivalent", check)
    algebra = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1")
    good, bad = score_texts(scorer(acc={"type": "numeric"}), algebra, "#### x+1", r"\boxed{1+x}")
    assert (good.reward, good.reward_errors) == (1.0, {})
    assert bad.reward_errors == {
        "acc": "reward.terms.acc (numeric): math-verify took longer than timeout_seconds = 5 on a:1, completion "
        r"'\\boxed{1+x}'"
    }
    raising = scorer(acc={"type": "numeric", "on_error": "raise", "timeout_seconds": 0.5})
    with pytest.raises(RewardError, match=r"took longer than timeout_seconds = 0\.5 on"):
        score_texts(raising, algebra, r"\boxed{1+x}")
    failure = RewardError  # as without math-verify, which ends the run even if failures are dropped
    with pytest.raises(RewardError, match="math-verify"):
        score_texts(scorer(acc={"type": "numeric", "on_error": "drop"}), algebra, r"\boxed{1+x}")


def test_a_reward_that_keeps_hanging_ends_the_run(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_term, "MAX_THREADS", 4)
    s = scorer(slow=python("slow", on_error="drop", timeout_seconds=0.05))
    scored = score_texts(s, prompt, "a", "b")
    assert all("took longer" in t.reward_errors["slow"] for t in scored)
    with pytest.raises(RewardError, match=r"^reward.terms.slow \(.*:slow\): 4 calls are still running after"):
        score_texts(s, prompt, "c")


@pytest.mark.parametrize("name", ["mean", "dropped", "a/b"])
def test_term_names_cannot_be_those_of_other_metrics(name: str) -> None:
    with pytest.raises(ValueError, match=rf"a term needs a name without / that is none of .*, got '{name}'"):
        RewardsConfig.model_validate({"terms": {name: {"type": "numeric"}}})
