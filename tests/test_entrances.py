"""Every entrance that a policy's text passes through, with hostile texts.

No exception leaves, the value is 0 or the text is content, and what a writer has stored reads back. The entrances are
those of the registries: a reward term, an environment, a template, a sink or a writer that has no run here fails a
test. `tests/rollout/gateway/test_reply_parser.py` runs all parsers of replies.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import json
import math
import pkgutil
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import megarl
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.reward import AnyRuleConfig, ModelRewardConfig, RewardConfig
from megarl.config.run import TrackingConfig
from megarl.rollout import environments
from megarl.rollout.environments.calculator import Calculator
from megarl.rollout.environments.conversation import ChatRenderer, RefusedTextError, bounded
from megarl.rollout.environments.environment import METHODS, Step
from megarl.rollout.environments.guess import Guess
from megarl.rollout.environments.http_tool import SHARED_KEY, HttpTool
from megarl.rollout.environments.python_interpreter import PythonInterpreter
from megarl.rollout.environments.search import Search
from megarl.rollout.journal import FinishedJob, Journal, read_step
from megarl.rollout.rollout_worker import GroupSummary, summarize
from megarl.text import describe_error, replace_surrogates
from megarl.tracking import tracker
from megarl.tracking.progress import RunProgress
from megarl.tracking.tracker import Tracker, write_rollouts
from tests.hostile_texts import hostile_texts, sampled_hostile_texts, texts_of_kinds
from tests.reward.conftest import decode, make_scorer, make_trajectory
from tests.rollout.environments.chat_templates import APPEND, DAY, SORTED_CALLS, STABLE, STRIPS_THOUGHTS, chat_tokenizer
from tests.rollout.environments.scripted import make_task
from tests.rollout.gateway import test_templates
from tests.rollout.whole_batches import make_group_job
from tests.sandbox.local_tiers import best_tier, patience

Texts = dict[str, str]

SIZES = [
    pytest.param(sampled_hostile_texts(), id="sample"),
    pytest.param(hostile_texts(), id="all", marks=pytest.mark.slow),
]
"""Texts for an entrance that needs processes: a sample in `make test`, all in `make test-slow`."""

ANSWER = "24681357"
"""Reference answer that no hostile text gives."""


def sampled(texts: Texts, stride: int) -> dict[str, str]:
    """Return every text at this distance from the one before."""
    return dict(list(texts.items())[::stride])


def is_plain(text: str) -> bool:
    """Return whether UTF-8 can encode the text."""
    return text.encode(errors="ignore").decode() == text


HOSTILE_ROW = Prompt(
    prompt_id="train.jsonl:7",
    text="Q?",
    token_ids=(81, 63),
    row={
        "answer": ANSWER,
        "missing": math.nan,
        "tests": [{"call": "f(1)", "expected": "[24681357]"}],
        **{f"{name} {text}": text for name, text in texts_of_kinds("characters/alone").items()},
    },
    answer=ANSWER,
)
"""The prompt of a row that has hostile texts in names and values of its fields."""


# reward terms


def returns_the_text(trajectory: Trajectory, text: str, row: Mapping[str, Any]) -> object:
    return {"reward": 0, text if text != "reward" else "x": 1}


def raises_the_text(trajectory: Trajectory, text: str, row: Mapping[str, Any]) -> object:
    raise ValueError(text)


async def exits_with_the_text(trajectory: Trajectory, text: str, row: Mapping[str, Any]) -> object:
    raise SystemExit(text)


def interrupts(trajectory: Trajectory, text: str, row: Mapping[str, Any]) -> object:
    raise KeyboardInterrupt(text)


RESULTS: Mapping[str, object] = {
    "integer beyond floats": 10**400,
    "integer without text": 10**5000,
    "list with an integer without text": [10**5000],
    "not a number": math.nan,
    "array without dimensions": np.array(5.0),
    "text": "\ud800",
    "deep list": eval("[" * 80 + "]" * 80),
}


def returns_what_is_named(trajectory: Trajectory, text: str, row: Mapping[str, Any]) -> object:
    return RESULTS[text]


def returns_what_is_named_for_all(trajectories: Any, texts: list[str], row: Mapping[str, Any]) -> object:
    return RESULTS[texts[0]]


def python_term(function: Callable[..., object], **options: Any) -> dict[str, Any]:
    return {"type": "python", "path": f"{__name__}:{function.__name__}", **options}


TERMS: Mapping[str, dict[str, Any]] = {
    "numeric": {"type": "numeric"},
    "strict numeric": {"type": "numeric", "strict": True},
    "math": {"type": "math"},
    "format": {"type": "format", "pattern": r"^24681357 (a+)+$"},
    "environment": {"type": "environment"},
    "python": python_term(returns_the_text),
    "http": {"type": "http", "url": "http://service"},
    "judge": {"type": "judge", "url": "http://service", "model": "m", "rubric": "{prompt} {completion} {answer}"},
}
"""Terms of the configuration; on a hostile completion the value of each is 0."""

SANDBOXED_TERMS: Mapping[str, dict[str, Any]] = {
    "code": {"type": "code", "sandbox": {"wall_seconds": 1.0, "cpu_seconds": 1, "memory_mib": 128}},
}


def test_every_reward_term_has_a_run() -> None:
    kinds = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(AnyRuleConfig)}
    assert {term["type"] for term in (*TERMS.values(), *SANDBOXED_TERMS.values())} == kinds
    # all terms of the configuration are rules, or models, which read tokens
    assert {get_args(each)[0] for each in get_args(get_args(RewardConfig)[0])} == {
        *get_args(AnyRuleConfig),
        ModelRewardConfig,
    }


def answer_as_a_service(request: httpx.Request) -> httpx.Response:
    """Answer a request of `http` or `judge`, if a strict reader of JSON takes it."""
    sent = request.content.decode()
    assert is_plain(sent)
    body = json.loads(sent, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert is_plain(json.dumps(body, ensure_ascii=False)), "a surrogate"
    if "messages" in body:
        return httpx.Response(200, json={"choices": [{"message": {"content": "Score: 0\n[[0]]"}}]})
    return httpx.Response(200, json=[0.0] * len(body["completions"]))


def run_with_service(
    answer: Callable[[httpx.Request], httpx.Response], work: Callable[[], Coroutine[Any, Any, Any]]
) -> Any:
    """Return the result of `work`, whose clients get their answers from `answer`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
        return asyncio.run(work())


def score(
    term: dict[str, Any],
    texts: Texts,
    answer: Callable[[httpx.Request], httpx.Response] = answer_as_a_service,
    *,
    reference: str = ANSWER,
) -> dict[str, Trajectory]:
    """Return the scored trajectory of each text; `answer`: that of a service, `reference`: that of the row."""

    async def work() -> dict[str, Trajectory]:
        scorer = make_scorer(term=term)
        group = await scorer.score([*map(make_trajectory, texts.values())], replace(HOSTILE_ROW, answer=reference))
        await scorer.close()
        return dict(zip(texts, group.trajectories, strict=True))

    scored: dict[str, Trajectory] = run_with_service(answer, work)
    return scored


def without_value_0(scored: Mapping[str, Trajectory]) -> dict[str, object]:
    return {name: t.reward_errors or t.rewards for name, t in scored.items() if t.rewards.get("term") != 0.0}


JUDGE = {"min_score": 0, "max_score": 1, "pattern": r"Score: (\d)"}


@pytest.mark.parametrize("name", TERMS)
def test_terms_give_0_to_hostile_completions(name: str) -> None:
    term = TERMS[name] | (JUDGE if name == "judge" else {})
    scored = score(term, hostile_texts())
    assert without_value_0(scored) == {}
    assert all(is_plain(key) for trajectory in scored.values() for key in trajectory.rewards)


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(sampled_hostile_texts(20) | sampled(texts_of_kinds("answers"), 6), id="sample"),
        pytest.param(hostile_texts(), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("reference", ["x + 24681357", "(2, \\infty)"])
def test_comparisons_that_need_algebra_give_0(texts: Texts, reference: str) -> None:
    assert without_value_0(score(TERMS["math"], texts, reference=reference)) == {}


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(sampled_hostile_texts(8) | sampled(texts_of_kinds("programs"), 5), id="sample"),
        pytest.param({**hostile_texts()}, id="all", marks=pytest.mark.slow),
    ],
)
def test_code_terms_give_0_to_hostile_programs(texts: Texts) -> None:
    term = SANDBOXED_TERMS["code"]
    with patience():
        found = score(term | {"sandbox": term["sandbox"] | sandbox_of_this_machine()}, texts)
    assert without_value_0(found) == {}


def sandbox_of_this_machine() -> dict[str, Any]:
    if best_tier() == "unsafe":
        pytest.skip("no sandbox works on this machine")
    return {"tier": best_tier()}


@pytest.mark.parametrize("function", [raises_the_text, exits_with_the_text, interrupts])
def test_what_a_reward_function_raises_is_a_message_on_one_line(function: Callable[..., object]) -> None:
    for name, trajectory in score(python_term(function), hostile_texts()).items():
        message = trajectory.reward_errors["term"]
        assert message.isprintable(), name
        assert "raised" in message


@pytest.mark.parametrize(
    "term", [python_term(returns_what_is_named), python_term(returns_what_is_named_for_all, per="group")]
)
def test_what_a_reward_function_returns_is_a_value_or_a_message(term: dict[str, Any]) -> None:
    for name, trajectory in score(term, {name: name for name in RESULTS}).items():
        assert re.search("not a (finite number|number|sequence)", trajectory.reward_errors["term"]), name


ANSWERS: Mapping[str, httpx.Response] = {
    "digits": httpx.Response(200, content="[" + "9" * 5000 + "]"),
    "integer beyond floats": httpx.Response(200, content="[" + "9" * 400 + "]"),
    "number beyond floats": httpx.Response(200, content="[1e400]"),
    "not numbers": httpx.Response(200, content="[NaN]"),
    "infinite": httpx.Response(200, content="[-Infinity]"),
    "deep": httpx.Response(200, content="[" * 100_000 + "]" * 100_000),
    "nested": httpx.Response(200, content="[" * 900 + "]" * 900),
    "bytes": httpx.Response(200, content=b"\xff\xfe\x00"),
    "wrong compression": httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")),
    "wrong charset": httpx.Response(200, headers={"Content-Type": "text/plain; charset=no-such"}, content=b"\xff"),
    "surrogate in a name": httpx.Response(200, content='[{"reward": "x", "\\ud800": 1}]'),
    "null": httpx.Response(200, content='[{"reward": null}]'),
    "no message": httpx.Response(200, content='{"choices": [{"message": {"content": 5}}]}'),
    "long score": httpx.Response(200, json={"choices": [{"message": {"content": "Score: " + "9" * 100_000}}]}),
    "surrogate in a refusal": httpx.Response(400, content='{"error": "\\ud800"}\n\x1b[2J'),
}
"""What a service answers, against its own rules."""


@pytest.mark.parametrize("kind", ["http", "judge"])
@pytest.mark.parametrize("name", ANSWERS)
def test_hostile_answers_of_services_are_failures_with_a_message(kind: str, name: str) -> None:
    again = {"max_retries": 0, **(JUDGE | {"pattern": r"Score: (\d+)"} if kind == "judge" else {})}
    made = ANSWERS[name]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(made.status_code, headers=made.headers, stream=made.stream)

    trajectory = score(TERMS[kind] | again, {"x": "x"}, answer)["x"]
    message = trajectory.reward_errors["term"]
    assert message.isprintable()
    assert len(message) < 1500
    assert not trajectory.rewards


# environments and their tools


class Body(httpx.AsyncByteStream):
    """The body of a response that has not been read yet."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


def serve_echo(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=Body(request.content or request.url.raw_path))


def run_steps(make: Callable[[], Any], texts: Texts, calls: tuple[str, ...]) -> None:
    """Send replies with the texts to environments, and write the messages that they answer with."""
    renderer = ChatRenderer(chat_tokenizer(APPEND), DAY)

    async def work() -> None:
        transport = httpx.MockTransport(serve_echo)
        row = {"context": [["Town", ["Sentence one.", " Two."]]]}
        for name, text in texts.items():
            for call in calls:
                environment = make()
                await finished(environment.reset(make_task(ANSWER, row, {SHARED_KEY: transport})))
                step = await finished(environment.step(call.replace("TEXT", text)))
                assert isinstance(step, Step)
                assert step.reward == 0, name
                assert step.done or step.messages
                messages = [bounded(message, 4096) for message in step.messages]
                renderer.extension([{"role": "user", "content": "?"}], "yes", messages, None, step.reply)
                await finished(environment.close())

    asyncio.run(work())


async def finished(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


ENVIRONMENTS: Mapping[type, tuple[Callable[[], Any], tuple[str, ...]]] = {
    Calculator: (Calculator, ("TEXT", "calc(TEXT)", "calc(2 + TEXT", "#### TEXT", "TEXT #### 1")),
    Guess: (Guess, ("TEXT", "-TEXT", "7 TEXT")),
    Search: (Search, ("TEXT", "search(TEXT)", "#### TEXT", "#### \n\n TEXT\nx")),
    HttpTool: (
        partial(HttpTool, allow=["http://api/v1"], base_url="http://api/v1", methods=("GET", "POST")),
        *(
            (
                "TEXT",
                "http GET TEXT",
                "http GET /TEXT",
                "http GET http://api/v1/TEXT",
                "http POST /a TEXT",
                "#### TEXT",
            ),
        ),
    ),
}
"""Environments that ship: how one is made, and replies with calls of its tools, in which TEXT is a hostile text."""


def test_every_environment_that_ships_has_a_run() -> None:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.iter_modules(environments.__path__, f"{environments.__name__}.")
    ]
    shipped = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and all(map(partial(hasattr, value), METHODS))
    }
    assert {each for each in shipped if not getattr(each, "_is_protocol", False)} == {*ENVIRONMENTS, PythonInterpreter}


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.__name__)
def test_environments_answer_hostile_replies(environment: type) -> None:
    make, calls = ENVIRONMENTS[environment]
    run_steps(make, hostile_texts(), calls)


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(sampled_hostile_texts(8) | sampled(texts_of_kinds("programs"), 7), id="sample"),
        pytest.param(hostile_texts(), id="all", marks=pytest.mark.slow),
    ],
)
def test_interpreters_answer_hostile_programs(texts: Texts) -> None:
    sandbox = SANDBOXED_TERMS["code"]["sandbox"] | sandbox_of_this_machine()
    with patience():
        run_steps(partial(PythonInterpreter, sandbox=sandbox), texts, ("TEXT", "```python\nTEXT\n```"))


def test_spaces_after_the_mark_of_an_answer_take_no_time() -> None:
    reply = "#### " + " " * 100_000 + "x\ny"  # a lazy pattern would try this for days
    for environment in (Search(), HttpTool(allow=["http://api/v1"])):
        assert asyncio.run(finished(environment.step(reply))) == Step(reward=0.0, done=True)


# chat templates

RAISES = "{% for m in messages %}{% if 'x' in m.content %}{{ 1 // 0 }}{% endif %}{% endfor %}" + APPEND
TEMPLATES: Mapping[str, str] = STABLE | {
    "strips thoughts": STRIPS_THOUGHTS,
    "sorted calls": SORTED_CALLS,
    "raises": RAISES,
    "json": APPEND.replace("{{ m.content }}", "{{ m.content | tojson }}"),
    "index": APPEND.replace("{{ m.content }}", "{{ m.content.split('</think>')[m.content.count('<think>')] }}"),
}


def render_all(renderer: ChatRenderer, texts: Texts) -> None:
    """Write conversations in which the policy, or the environment after it, has written the texts."""
    question = {"role": "user", "content": "is it?"}
    for text in texts.values():
        with suppress(RefusedTextError):
            found = renderer.extension([question], text, [question], None, None)
            assert is_plain(found.text)
            assert all(isinstance(token, int) for token in found.token_ids)
        with suppress(RefusedTextError):
            found = renderer.extension([question], "yes", [{"role": "user", "content": text}], None, None)
            assert is_plain(found.text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_write_or_refuse_hostile_texts(name: str) -> None:
    texts = hostile_texts() if name == "append" else sampled_hostile_texts()
    render_all(ChatRenderer(chat_tokenizer(TEMPLATES[name]), DAY), texts)


@pytest.mark.parametrize("texts", [pytest.param(sampled_hostile_texts(20), id="sample"), SIZES[1]])
def test_published_chat_templates_write_or_refuse_hostile_texts(texts: Texts) -> None:
    if not test_templates.NAMES:
        pytest.skip("`make test` installs the published templates")
    for name in test_templates.NAMES:
        renderer = ChatRenderer(test_templates.published_tokenizer(name), DAY)
        if not renderer.omits("user"):  # templates for lists of text and images
            render_all(renderer, texts)


# writers


@cache
def finished_trajectories() -> dict[str, Trajectory]:
    """Return a trajectory for each text that has the text in all of its fields."""
    found = {}
    for name, text in hostile_texts().items():
        tokens = make_trajectory(text)
        fields = {each: getattr(tokens, each) for each in ("token_ids", "loss_mask", "logprobs", "policy_versions")}
        found[name] = Trajectory(
            **fields,
            prompt_id=f"{text}:7",
            group_id=0,
            rewards={text: 0.5},
            reward_errors={text: describe_error(ValueError(text)), "raw": text},
            finish_reason=text,
        )
    return found


def test_rollout_files_read_back(tmp_path: Path) -> None:
    trajectories, path = finished_trajectories(), tmp_path / "step.parquet"
    write_rollouts(path, [*trajectories.values()], [None] * len(trajectories), step=1, decode=decode)
    rows = pq.read_table(path).to_pylist()
    for text, row in zip(hostile_texts().values(), rows, strict=True):
        plain = replace_surrogates(text)
        assert (row["response"], row["finish_reason"], row["prompt_id"]) == (plain, plain, f"{plain}:7")
        assert row["rewards"] == [(plain, 0.5)]
        assert dict(row["reward_errors"])["raw"] in (plain, row["reward_errors"][-1][1])
        assert row["token_ids"] == [ord(c) for c in "Q?" + text]


def test_journals_read_back(tmp_path: Path) -> None:
    made, jobs = finished_trajectories(), []
    for number, trajectory in enumerate(made.values()):
        prompt = Prompt(prompt_id=trajectory.prompt_id, text="Q?", token_ids=(81, 63), row={})
        job = make_group_job(prompt, group_id=0, request_id=f"step-1-{number}")
        summary = GroupSummary(
            group_id=0,
            prompt_id=trajectory.prompt_id,
            trajectories=(summarize(trajectory),),
            generation_seconds=1.0,
            scoring_seconds=1.0,
        )
        jobs.append(FinishedJob(job, summary, [trajectory]))
    Journal(tmp_path, "fingerprint").append(1, jobs)
    entries = {entry.request_id: entry for entry in read_step(tmp_path, 1)}
    for number, (text, trajectory) in enumerate(zip(hostile_texts().values(), made.values(), strict=True)):
        (found,) = entries[f"step-1-{number}"].trajectories
        plain = replace_surrogates(text)
        assert (found.prompt_id, found.finish_reason) == (f"{plain}:7", plain)
        assert found.rewards == {plain: 0.5}
        assert found.reward_errors["raw"] == plain or text == "raw"
        np.testing.assert_array_equal(found.token_ids, trajectory.token_ids)


def read_tensorboard(run_dir: Path) -> set[str]:
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 1})
    events.Reload()
    return {*events.Tags()["scalars"]}


SINKS = {"JsonlSink", "TensorboardSink", "WandbSink"}
"""W&B's own client writes what `WandbSink` gets, and a user's class what `UserSink` gets: the same as the other two."""


def test_every_sink_has_a_run() -> None:
    found = {name for name, value in vars(tracker).items() if inspect.isclass(value) and name.endswith("Sink")}
    assert found - {"Sink", "UserSink"} == SINKS


def test_names_of_metrics_read_back(tmp_path: Path) -> None:
    texts = {**sampled_hostile_texts(), **texts_of_kinds("characters/inside", "records", "formats")}
    names = [f"reward/{text}" for text in texts.values()]
    with Tracker(TrackingConfig(), tmp_path, notify=print) as tracker:
        tracker.log(dict.fromkeys(names, 0.5), step=1)
        tracker.log({"reward/mean": 0.25}, step=2)
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[:2])
    plain = {replace_surrogates(name) for name in names}
    assert first == {"step": 1, **dict.fromkeys(plain, 0.5)}
    assert second == {"step": 2, "reward/mean": 0.25}
    assert read_tensorboard(tmp_path) == plain | {"reward/mean"}


def test_lines_on_a_terminal_are_not_obeyed() -> None:
    for name, text in {**sampled_hostile_texts(), **texts_of_kinds("characters/inside", "records")}.items():
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
        progress = RunProgress(40, Console(file=out, width=200))
        progress.notify(f"step 3: failed: {text}")
        out.flush()
        out.seek(0)
        written = out.read()
        assert written.startswith("step 3: failed: "), name
        assert written.replace("\n", "").isprintable(), name


WRITERS = {
    "tracking/tracker.py": test_rollout_files_read_back,
    "rollout/journal.py": test_journals_read_back,
    "megatron/training/update_guard.py": None,
}
"""Modules that write tables, and their tests; a rejected batch has tokens and numbers only."""


def test_every_writer_of_tables_has_a_run() -> None:
    root = Path(megarl.__file__).parent
    writes = re.compile(r"pq\.write_table|ParquetWriter|record_batch\([^)]*\)\.serialize|csv\.writer|ipc\.new_")
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if writes.search(file.read_text())}
    assert found == WRITERS.keys()
