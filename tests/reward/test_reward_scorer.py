from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward import math_equivalence
from megarl.reward.reward_scorer import RewardScorer
from tests.reward.conftest import decode, make_trajectory

HERE = __name__


def plus(trajectory: Any, text: str, row: Any) -> float:
    return len(text) + row["bonus"]


async def bonus(trajectory: Any, text: str, row: Any) -> float:
    await asyncio.sleep(0)
    return row["bonus"]


def numpy_number(trajectory: Any, text: str, row: Any) -> Any:
    return np.float32(trajectory.num_tokens)


def boolean(trajectory: Any, text: str, row: Any) -> Any:
    return True


def raises(trajectory: Any, text: str, row: Any) -> float:
    raise ValueError("no such thing")


async def raises_async(trajectory: Any, text: str, row: Any) -> float:
    raise TimeoutError("the judge did not answer")


def exits(trajectory: Any, text: str, row: Any) -> float:
    sys.exit("bye")


def nan(trajectory: Any, text: str, row: Any) -> float:
    return float("nan")


def negative_infinity(trajectory: Any, text: str, row: Any) -> float:
    return float("-inf")


def string(trajectory: Any, text: str, row: Any) -> Any:
    return "1.0"


def none(trajectory: Any, text: str, row: Any) -> Any:
    return None


def slow(trajectory: Any, text: str, row: Any) -> float:
    time.sleep(30)
    return 1.0


async def slow_async(trajectory: Any, text: str, row: Any) -> float:
    await asyncio.sleep(30)
    return 1.0


def nap(trajectory: Any, text: str, row: Any) -> float:
    time.sleep(0.05)
    return 1.0


def scorer(**terms: dict[str, Any]) -> RewardScorer:
    return RewardScorer(RewardsConfig.model_validate({"terms": terms}), decode)


def python(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "python", "path": f"{HERE}:{name}", **fields}


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
    rewards, total = asyncio.run(s.score(make_trajectory("so #### 72"), prompt))
    assert rewards == {
        "accuracy": 1.0, "strict": 1.0, "format": 1.0, "plus": 10.5, "bonus": 0.5, "tokens": 12.0, "boolean": 1.0
    }  # fmt: skip
    assert total == pytest.approx(2.0 + 1.0 - 0.5 + 1.05 + 0.5 + 1.0)
    assert all(type(v) is float for v in rewards.values())


def test_text_excludes_prompt_and_unsampled_tokens(prompt: Prompt) -> None:
    s = scorer(accuracy={"type": "numeric"})
    rewards, _ = asyncio.run(s.score(make_trajectory("no idea", prompt="#### 72\n"), prompt))
    assert rewards == {"accuracy": 0.0}


def test_strict_requires_a_stop_token(prompt: Prompt) -> None:
    s = scorer(accuracy={"type": "numeric", "strict": True})
    _, total = asyncio.run(s.score(make_trajectory("#### 72", finish_reason="length"), prompt))
    assert total == 0.0


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
        ("slow", "took longer than timeout_seconds = 0.2"),
        ("slow_async", "took longer than timeout_seconds = 0.2"),
    ],
)
def test_failing_function_is_named_with_prompt_and_completion(prompt: Prompt, name: str, message: str) -> None:
    s = scorer(mine=python(name, timeout_seconds=0.2))
    head = rf"^reward.terms.mine \(tests.reward.test_reward_scorer:{name}\) {message}"
    with pytest.raises(RewardError, match=rf"{head}.* on train.jsonl:7, completion 'so it is'$") as caught:
        asyncio.run(s.score(make_trajectory("so it is"), prompt))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_long_completion_is_shortened_in_errors(prompt: Prompt) -> None:
    with pytest.raises(RewardError) as caught:
        asyncio.run(scorer(mine=python("raises")).score(make_trajectory("a" * 10_000 + "z"), prompt))
    assert len(str(caught.value)) < 700
    assert "aaa ... aaa" in str(caught.value)
    assert str(caught.value).endswith("az'")


def test_missing_reference_answer_raises(prompt: Prompt) -> None:
    without = Prompt(prompt_id="train.jsonl:9", text="Q?", token_ids=(1,), row={})
    with pytest.raises(RewardError, match=r"reward.terms.acc \(numeric\) needs a reference answer .*train.jsonl:9"):
        asyncio.run(scorer(acc={"type": "numeric"}).score(make_trajectory("#### 1"), without))


def test_invalid_terms_name_their_yaml_path() -> None:
    with pytest.raises(ConfigError, match=r"^reward.terms.f.pattern needs a regular expression, got '\('"):
        scorer(f={"type": "format", "pattern": "("})
    with pytest.raises(ConfigError, match=r"^reward.terms.g.path: module .* has no 'absent'"):
        scorer(g=python("absent"))


def test_math_verify_does_not_block_the_event_loop() -> None:
    s = scorer(accuracy={"type": "numeric"})
    prompt = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="x+1")

    async def score_and_count_ticks() -> tuple[float, int]:
        scoring = asyncio.create_task(s.score(make_trajectory(r"so \boxed{1+x}"), prompt))
        ticks = 0
        while not scoring.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return (await scoring)[1], ticks

    math_equivalence._checker.close()  # its restart takes long enough to count event-loop iterations
    math_equivalence.is_equivalent.cache_clear()
    reward, ticks = asyncio.run(score_and_count_ticks())
    assert reward == 1.0
    assert ticks > 20


def test_sync_functions_run_concurrently(prompt: Prompt) -> None:
    s = scorer(nap=python("nap", timeout_seconds=2.0))

    async def score_many() -> None:
        await asyncio.gather(*(s.score(make_trajectory("x"), prompt) for _ in range(64)))

    start = time.perf_counter()
    asyncio.run(score_many())
    assert time.perf_counter() - start < 1.5


def test_rules_take_under_a_millisecond_per_completion(prompt: Prompt) -> None:
    s = scorer(accuracy={"type": "numeric"}, format={"type": "format"})

    async def score_many() -> float:
        await s.score(make_trajectory("warm #### 72"), prompt)
        start = time.process_time()  # CPU time of this process, independent of the load of the node
        await asyncio.gather(*(s.score(make_trajectory(f"{i} #### {i}"), prompt) for i in range(256)))
        return time.process_time() - start

    assert asyncio.run(score_many()) / 256 < 1e-3


def test_hung_function_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\ndef f(t, text, row): time.sleep(60)\n")
    code = (
        "import asyncio\n"
        "from megarl.config.reward import RewardsConfig\n"
        "from megarl.reward.reward_scorer import RewardScorer\n"
        "from tests.reward.conftest import *\n"
        "term = {'type': 'python', 'path': 'hanging:f', 'timeout_seconds': 0.1}\n"
        "c = RewardsConfig.model_validate({'terms': {'h': term}})\n"
        "p = Prompt(prompt_id='a:1', text='', token_ids=(), row={})\n"
        "asyncio.run(RewardScorer(c, decode).score(make_trajectory('x'), p))\n"
    )
    root = str(Path(__file__).parents[2])
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert "took longer than timeout_seconds = 0.1" in done.stderr
    assert time.perf_counter() - start < 45


def test_scorer_decodes_with_the_models_tokenizer(tmp_path: Path) -> None:
    from megarl.data.tiny_checkpoint import write_tiny_model
    from megarl.data.tokenizer import load_tokenizer

    write_tiny_model(tmp_path, ["8+3=11 #### 11"], seed=0)
    tokenizer = load_tokenizer(tmp_path)
    ids = [*tokenizer("8+3=11 , isn 't #### 11")["input_ids"], tokenizer.eos_token_id]
    trajectory = make_trajectory("".join(map(chr, ids)), prompt="")
    config = RewardsConfig.model_validate(
        {
            "terms": {
                "a": {"type": "numeric", "strict": True},
                "spaces": {"type": "format", "pattern": r"^8\+3=11 , isn 't"},
            }
        }
    )
    prompt = Prompt(prompt_id="a:1", text="", token_ids=(), row={}, answer="11")
    rewards, _ = asyncio.run(RewardScorer.from_model(config, str(tmp_path)).score(trajectory, prompt))
    assert rewards == {"a": 1.0, "spaces": 1.0}


def test_model_terms_are_skipped() -> None:
    terms = {"rm": {"type": "model", "path": "nowhere", "weight": 2.0}, "f": {"type": "format", "pattern": "."}}
    for config, expected in ((terms, ({"f": 1.0}, 1.0)), ({"rm": terms["rm"]}, ({}, 0.0))):
        scorer = RewardScorer(RewardsConfig.model_validate({"terms": config}), decode)
        prompt = Prompt(prompt_id="p", text="", token_ids=(), row={})
        assert asyncio.run(scorer.score(make_trajectory("yes"), prompt)) == expected
