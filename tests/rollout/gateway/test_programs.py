"""Commands and functions as harnesses: their task, their failures, and processes and requests that they leave."""

import asyncio
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from megarl.config.rollout import HarnessConfig, RolloutConfig
from megarl.engines.engine import Generation, GenerationRequest, no_tokens
from megarl.engines.engine_pool import PooledEngine
from megarl.errors import ConfigError
from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway import harness_agent
from megarl.rollout.gateway.harness_process import check_harness
from megarl.rollout.gateway.reply_parser import SglangParser
from megarl.rollout.gateway.turn_request import TurnRequest
from megarl.rollout.rollout_worker import GroupSummary
from tests.errors import expect_error
from tests.rollout.clock import in_event_loop, iterate, jump
from tests.rollout.gateway import scripted
from tests.rollout.gateway.clients import ask_raw
from tests.rollout.gateway.scripted import SeededEngine, logged_ids, make_agent, make_prompt, run_groups, sampled_ids
from tests.rollout.whole_batches import make_generation, with_routes
from tests.time_limits import UNREACHED_SECONDS, wait_for

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, "model": os.environ["OPENAI_MODEL"]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""


def run_script(tokenizer: Any, script: str, **config: Any) -> tuple[SeededEngine, Any, Any]:
    engine = SeededEngine(tokenizer)
    agent = make_agent(tokenizer, command=[sys.executable, "-c", ASK + textwrap.dedent(script)], **config)
    ((summary, trajectories),) = run_groups(engine, agent, [make_prompt(tokenizer)])
    return engine, summary, trajectories


def test_a_command_gets_its_task_and_may_return_a_reward(tokenizer: Any, tmp_path: Path) -> None:
    engine, summary, trajectories = run_script(
        tokenizer,
        f"""
        reply = ask(task["messages"])
        ask([*task["messages"], reply, {{"role": "user", "content": "why?"}}])
        variables = {{key for key in os.environ if key.startswith("RAY_") or key == "PYTHONPATH"}}
        found = {{**task, "variables": sorted(variables), "mine": os.environ["MINE"]}}
        json.dump(found, open({str(tmp_path / "task.json")!r}, "w"))
        json.dump({{"reward": 0.25}}, open(os.environ["RESULT_FILE"], "w"))
        """,
        kwargs={"depth": 2},
        env={"MINE": "5"},
        needs_reward=True,
    )
    task = json.loads((tmp_path / "task.json").read_text())
    assert task.pop("seed") >= 0
    assert task == {
        "prompt_id": "d.jsonl:1",
        "messages": [{"role": "user", "content": "is it?"}],
        "tools": [],
        "row": {"prompt": "is it?"},  # not the answer
        "kwargs": {"depth": 2},
        "variables": [],
        "mine": "5",
    }
    assert summary.trajectories[0].rewards == {"game": 0.25}
    assert trajectories[0].turn_rewards == (0.0, 0.25)
    assert sampled_ids(trajectories) == logged_ids(engine)


FAILURES = {
    "exit code": ("ask(task['messages']); print('no disk'); sys.exit(3)", "ended with exit code 3: no disk"),
    "death": ("ask(task['messages']); os.kill(os.getpid(), 9)", "ended with exit code -9"),
    "hang": ("import time; time.sleep(6000)", "did not end and asked for no further turn within"),
    "no request": ("pass", "ended without a request to the policy"),
    "no reward": ("ask(task['messages'])", "needs to return a reward for the term of type environment, got none"),
    "bad reward": (
        "ask(task['messages']); open(os.environ['RESULT_FILE'], 'w').write('{\"reward\": NaN}')",
        "needs to return a finite reward up to 1e18, or none, got nan",
    ),
    "huge reward": (
        "ask(task['messages']); open(os.environ['RESULT_FILE'], 'w').write('{\"reward\": 1' + '0' * 400 + '}')",
        "needs to return a finite reward up to 1e18, or none, got 1000",
    ),
    "nested result": (
        "ask(task['messages']); open(os.environ['RESULT_FILE'], 'w').write('[' * 100000)",
        "wrote no JSON to RESULT_FILE: RecursionError",
    ),
    "folder as result": (
        "ask(task['messages']); os.mkdir(os.environ['RESULT_FILE'])",
        "wrote no JSON to RESULT_FILE: IsADirectoryError",
    ),
    "refused": ("ask([{'role': 'user'}, 3])", "(its last refused request: a message needs a role, got 3)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_fails_twice_is_left_out_and_never_a_reward_of_0(tokenizer, name, monkeypatch) -> None:
    script, message = FAILURES[name]
    limits = {}
    if name == "hang":
        monkeypatch.setattr(harness_agent, "END_SECONDS", 0.1)
        limits["max_seconds"] = 0.1
    _, summary, (trajectory,) = run_script(tokenizer, script, needs_reward=name == "no reward", **limits)
    assert message in trajectory.reward_errors["environment"]
    assert not trajectory.loss_mask.any()
    assert summary.kept == ()
    assert summary.terms["environment"].num_retried == 1  # asked again once


def test_a_program_that_fails_once_is_repeated(tokenizer: Any, tmp_path: Path) -> None:
    mark = tmp_path / "failed"
    engine, summary, trajectories = run_script(
        tokenizer,
        f"""
        ask(task["messages"])
        if not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, "w").close()
            sys.exit(1)
        """,
    )
    assert summary.kept == (0,)
    assert len(engine.log) == 2
    assert sampled_ids(trajectories) == [engine.log[1][1].token_ids.tolist()]  # nothing of the first attempt


def test_a_program_that_fails_after_a_limit_is_truncated(tokenizer: Any) -> None:
    script = "for n in range(9): ask([{'role': 'user', 'content': str(n)}])"
    _, summary, _ = run_script(tokenizer, script, max_turns=2)
    assert summary.trajectories[0].finish_reason == "turns"
    assert summary.kept == (0,)


def test_no_process_of_a_program_survives_its_episode(tokenizer: Any, tmp_path: Path) -> None:
    _, summary, _ = run_script(
        tokenizer,
        f"""
        import subprocess
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)  # {tmp_path}"
        sleep = [sys.executable, "-c", code]
        subprocess.Popen(sleep, env={{}})  # in the group of the program
        subprocess.Popen(sleep, start_new_session=True)  # a daemon
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                import time; time.sleep(3600)
            os._exit(0)
        ask(task["messages"])
        print(os.environ["OPENAI_API_KEY"])
        """,
    )
    assert summary.kept == (0,)
    assert not list(_with_command(str(tmp_path)))


def _with_command(text: str) -> Iterator[str]:
    """Yield the processes whose command line has the text."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if text.encode() in (folder / "cmdline").read_bytes():
                yield folder.name


async def hang_for_ever(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))
    jump(3 * UNREACHED_SECONDS)
    await asyncio.sleep(1e6)


async def raise_an_error(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))
    raise RuntimeError("no such tool")


@pytest.mark.parametrize(("function", "message"), [(hang_for_ever, "did not end"), (raise_an_error, "no such tool")])
def test_functions_fail_as_commands_do(tokenizer: Any, function: Any, message: str) -> None:
    agent = make_agent(tokenizer, function)
    ((_, (trajectory,)),) = run_groups(SeededEngine(tokenizer), agent, [make_prompt(tokenizer)])
    assert message in trajectory.reward_errors["environment"]


class LateEngine(SeededEngine):
    """The time of an episode is over while a request is in flight."""

    async def generate(self, request: GenerationRequest) -> Generation:
        jump(3 * UNREACHED_SECONDS)
        await iterate()
        return await super().generate(request)


def test_a_turn_that_is_sampled_when_the_time_is_over_is_trained(tokenizer: Any) -> None:
    engine = LateEngine(tokenizer)
    ((summary, trajectories),) = run_groups(engine, make_agent(tokenizer, hang_for_ever), [make_prompt(tokenizer)])
    assert summary.trajectories[0].finish_reason == "seconds"
    assert sampled_ids(trajectories) == logged_ids(engine)


running: Counter[str] = Counter()


async def count_programs(task: Task, base_url: str, api_key: str) -> None:
    running["now"] += 1
    running["most"] = max(running["most"], running["now"])
    await ask_raw(base_url, api_key, list(task.messages))
    running["now"] -= 1


def test_no_more_programs_run_at_once_than_allowed(tokenizer: Any) -> None:
    running.clear()
    agent = make_agent(tokenizer, count_programs, max_programs=2)
    run_groups(SeededEngine(tokenizer), agent, [make_prompt(tokenizer, number) for number in range(6)])
    assert running == {"now": 0, "most": 2}


def not_async(task: Task, base_url: str, api_key: str) -> None: ...
async def takes_too_little(task: Task) -> None: ...


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"command": ["no-such-program-1"]}, "rollout.harness.command: the program 'no-such-program-1' was not found"),
        ({"path": f"{__name__}:not_async"}, "rollout.harness.path needs an async function, got"),
        ({"path": f"{__name__}:takes_too_little"}, "needs to take task, base_url, api_key and rollout.harness.kwargs"),
        ({"path": f"{__name__}:hang_for_ever", "kwargs": {"a": 1}}, "got an unexpected keyword argument 'a'"),
        ({"path": f"{__name__}:hang_for_ever", "tool_parser": "qwen99"}, "rollout.harness.tool_parser needs one of"),
        ({"path": f"{__name__}:hang_for_ever", "reasoning_parser": "no"}, "reasoning_parser needs one of"),
    ],
)
def test_programs_are_checked_before_the_run(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_harness(HarnessConfig(**section))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "command and path: one of them names the program, got neither"),
        ({"command": ["ls"], "path": "a:b"}, "command and path: one of them names the program, got both"),
        ({"command": []}, "command needs a program, got an empty list"),
        ({"path": "a:b", "env": {"A": "1"}}, "env belongs to a command, got it with path = a:b; remove it"),
    ],
)
def test_sections_name_one_program(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HarnessConfig(**section)


def test_one_of_agent_environment_and_harness_runs_an_episode() -> None:
    with expect_error(ValidationError, "agent, env and harness", "a:b", "env.path = c:D"):
        RolloutConfig.model_validate({"harness": {"path": "a:b"}, "env": {"path": "c:D"}})


QUICK, LONG = "is it?", "and for ever?"
"""Text of prompts that are answered at once, and of those that are sampled until they are aborted."""


@dataclass
class EndlessEngine(SeededEngine):
    """Samples replies to `LONG` until they are aborted, and others at once."""

    holds: bool = False
    """Whether others are sampled until their events are set."""
    in_flight: dict[str, asyncio.Event] = field(default_factory=dict)
    """By request id, set once the sampling of the request is to end."""
    aborted: list[str] = field(default_factory=list)
    mark: Path | None = None
    """A file that is created when a request is in flight."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if LONG not in self.tokenizer.decode(request.token_ids) and not self.holds:
            return await super().generate(request)
        stop = self.in_flight[request.request_id] = asyncio.Event()
        if self.mark is not None:
            self.mark.touch()
        await stop.wait()
        del self.in_flight[request.request_id]
        if request.request_id not in self.aborted:
            return await super().generate(request)
        return replace(no_tokens(), finish_reason="abort")

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await asyncio.sleep(0)  # a batch that has just arrived has not begun its requests
        if request_id in self.in_flight:
            self.in_flight[request_id].set()


engines: list[EndlessEngine] = []
"""Those of all groups, the current one last."""


def run_group(engine: EndlessEngine, agent: Any, **limits: float) -> Any:
    """Run a group of one episode, after which no request is in flight; return its summary."""
    engines.append(engine)
    prompt = make_prompt(engine.tokenizer, text=QUICK)
    ((summary, _),) = run_groups(engine, agent, [prompt], seconds=2 * UNREACHED_SECONDS, **limits)
    return summary


async def begin(base_url: str, text: str, num: int = 1) -> list[asyncio.Task[str]]:
    """Ask so many questions; the engine is sampling the answers when this returns."""
    messages = [{"role": "user", "content": f"{text} {n}"} for n in range(num)]
    asked = [asyncio.ensure_future(ask_raw(base_url, "", [each])) for each in messages]
    await asyncio.sleep(0.1)  # in which also a question that the engine is sampling already may arrive
    await wait_for(lambda: len(engines[-1].in_flight) >= num)
    return asked


async def cancel_all(asked: list[asyncio.Task[str]]) -> None:
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def disconnect_and_return(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))
    await cancel_all(await begin(base_url, LONG))


async def disconnect_and_raise(task: Task, base_url: str, api_key: str) -> None:
    await begin(base_url, LONG, num=3)
    raise RuntimeError("no such tool")


async def go_on_after_a_limit(task: Task, base_url: str, api_key: str) -> None:
    await begin(base_url, LONG, num=2)
    with pytest.raises(httpx.HTTPStatusError):
        await ask_raw(base_url, api_key, list(task.messages))
    await asyncio.sleep(1e6)


async def wait_for_ever(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))
    await begin(base_url, LONG)
    jump(3 * UNREACHED_SECONDS)
    await asyncio.sleep(1e6)


def test_a_request_that_a_program_has_left_is_aborted_at_its_end(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, disconnect_and_return))
    assert set(engine.aborted) == {"step-1-0-0.1"}
    assert summary.kept == (0,)  # the first turn is trained on
    assert summary.trajectories[0].num_turns == len(engine.log) == 1


def test_the_requests_of_a_program_that_fails_are_aborted_in_both_attempts(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, disconnect_and_raise, max_turn_tokens=100))
    assert "no such tool" in summary.trajectories[0].reward_errors["environment"]
    attempts = ("step-1-0-0", "step-1-0-0-retry1")
    assert engine.aborted == [f"{attempt}{turn}" for attempt in attempts for turn in ("", ".1", ".2")]


def test_the_request_of_a_command_that_dies_is_aborted(tokenizer: Any, tmp_path: Path) -> None:
    engine = EndlessEngine(tokenizer, mark=tmp_path / "in-flight")
    script = f"""
import threading, time
threading.Thread(target=ask, args=([{{"role": "user", "content": {LONG!r}}}],), daemon=True).start()
while not os.path.exists({str(engine.mark)!r}):
    time.sleep(0.01)
os.remove({str(engine.mark)!r})
os.kill(os.getpid(), 9)
"""
    summary = run_group(engine, make_agent(tokenizer, command=[sys.executable, "-c", ASK + script]))
    assert "ended with exit code -9" in summary.trajectories[0].reward_errors["environment"]
    assert engine.aborted == ["step-1-0-0", "step-1-0-0-retry1"]


def test_requests_are_aborted_when_a_program_does_not_end_after_a_limit(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(harness_agent, "END_SECONDS", 0.1)
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, go_on_after_a_limit, max_turns=2, max_turn_tokens=100))
    assert summary.trajectories[0].finish_reason == "turns"
    assert engine.aborted == ["step-1-0-0", "step-1-0-0.1"]


def test_requests_are_aborted_once_when_the_time_of_the_episode_is_over(tokenizer: Any, monkeypatch) -> None:
    monkeypatch.setattr(harness_agent, "END_SECONDS", 0.1)
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, wait_for_ever, max_seconds=1e6))
    assert engine.aborted == ["step-1-0-0.1"]
    assert (summary.kept, summary.trajectories[0].finish_reason) == ((0,), "seconds")
    assert summary.trajectories[0].response_length == len(engine.log[0][1].token_ids)


finished: list[dict[str, Any]] = []
"""The reply to the request that the time limit has ended, and the refusal of the next one."""


async def ask_beyond_the_limit(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))

    async def post(text: str) -> None:
        async with httpx.AsyncClient(verify=False, timeout=None) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            finished.append((await client.post(f"{base_url}/chat/completions", json=body)).json())

    asked = asyncio.ensure_future(post(LONG))
    await wait_for(lambda: bool(engines[-1].in_flight))
    jump(3 * UNREACHED_SECONDS)
    await asked
    await post("and what is it?")
    await asyncio.sleep(1e6)


class PartialEngine(EndlessEngine):
    """Answers an abort with the tokens so far."""

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        if generation.finish_reason != "abort":
            return generation
        generation = with_routes(make_generation([5, 6], reason="abort"), request)
        self.log.append((request, generation))
        return generation


def test_a_reply_over_the_time_limit_is_cut_and_further_requests_are_refused(tokenizer: Any, monkeypatch) -> None:
    monkeypatch.setattr(harness_agent, "END_SECONDS", 1.0)
    finished.clear()
    engine = PartialEngine(tokenizer)
    agent = make_agent(tokenizer, ask_beyond_the_limit, max_seconds=1e6)
    engines.append(engine)
    prompt = make_prompt(tokenizer, text=QUICK)
    ((summary, trajectories),) = run_groups(engine, agent, [prompt], seconds=2 * UNREACHED_SECONDS)
    assert finished[0]["choices"][0]["finish_reason"] == "length"
    assert finished[1]["error"]["code"] == "seconds"
    assert "rollout.request_timeout_seconds" in finished[1]["error"]["message"]
    assert summary.kept == (0,)
    assert {trajectory.finish_reason for trajectory in trajectories} == {"seconds"}
    assert sampled_ids(trajectories) == logged_ids(engine)


async def ask_for_ever(task: Task, base_url: str, api_key: str) -> None:
    await begin(base_url, LONG)
    await asyncio.sleep(1e6)


def test_an_engine_without_progress_fails_the_episode_after_a_second_request(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, ask_for_ever), no_progress_seconds=0.5)
    assert engine.aborted == ["step-1-0-0", "step-1-0-0-retry1"]
    assert list(summary.trajectories[0].reward_errors) == ["engine"]
    assert summary.terms["engine"].num_retried == 1


async def disconnect_and_ask_again(task: Task, base_url: str, api_key: str) -> None:
    """Give up a request that the engine is sampling, send it again, give it up again, and have it sampled."""
    await cancel_all(await begin(base_url, QUICK))
    await cancel_all(await begin(base_url, QUICK))
    for event in engines[-1].in_flight.values():
        event.set()
    await ask_raw(base_url, api_key, [{"role": "user", "content": f"{QUICK} 0"}])


def test_a_request_whose_client_is_gone_goes_on_while_the_session_lasts(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer, holds=True)
    summary = run_group(engine, make_agent(tokenizer, disconnect_and_ask_again))
    assert (engine.aborted, len(engine.log)) == ([], 1)
    assert summary.trajectories[0].num_turns == 1


closed: list[asyncio.Event] = []
late: list[httpx.Response] = []
sending: list[asyncio.Task[None]] = []


async def end_while_a_request_arrives(task: Task, base_url: str, api_key: str) -> None:
    """Send a request whose body arrives after the end of the episode."""
    await ask_raw(base_url, api_key, list(task.messages))

    async def body() -> Any:
        yield b'{"messages": ['
        await closed[-1].wait()
        yield b'{"role": "user", "content": "and for ever?"}]}'

    async def send() -> None:
        async with httpx.AsyncClient(verify=False, timeout=None) as client:
            late.append(await client.post(f"{base_url}/chat/completions", content=body()))

    closed.append(asyncio.Event())
    sending.append(asyncio.ensure_future(send()))
    await asyncio.sleep(0.1)  # in which the beginning may arrive


def test_a_request_that_arrives_as_its_session_is_closed_is_refused(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    agent = make_agent(tokenizer, end_while_a_request_arrives)

    async def agent_and_late_request(episode: Any) -> Any:
        trajectories = await agent(episode)
        closed[-1].set()
        await asyncio.gather(*sending)
        return trajectories

    agent_and_late_request.close = agent.close  # type: ignore[attr-defined]
    assert isinstance(run_group(engine, agent_and_late_request), GroupSummary)
    assert [response.status_code for response in late] == [401]
    assert len(engine.log) == 1


def test_a_request_that_was_not_sent_yet_is_not_sent_after_its_session_is_closed(tokenizer: Any) -> None:
    """Close the session after 1, 2, 3, ... iterations of the event loop, until the engine gets the request before."""

    async def sent_and_aborted(iterations: int) -> tuple[int, int]:
        engine = EndlessEngine(tokenizer)
        batching: Any = PooledEngine(engine)
        batching.tokenizer = tokenizer
        session = scripted.make_session(batching, 0)
        request = TurnRequest(messages=({"role": "user", "content": LONG},))
        asked = asyncio.ensure_future(session.answer(request))
        await iterate(iterations)
        is_sent = bool(engine.in_flight)
        await session.close()
        await iterate(20)
        assert engine.in_flight == {}
        with pytest.raises(asyncio.CancelledError):
            await asked
        return is_sent, len(engine.aborted)

    found = [asyncio.run(sent_and_aborted(iterations)) for iterations in range(1, 12)]
    assert found[0] == (False, 0)
    assert found[-1] == (True, 1)


SLOW_CHILD = """
import json, os, sys, time
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "slow":
        open("begun", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    print(json.dumps({"content": text, "reasoning": "", "calls": []}), flush=True)
"""


@in_event_loop
async def test_the_answer_for_a_cancelled_caller_is_not_taken_for_the_next_one(tmp_path, monkeypatch) -> None:
    child = tmp_path / "child.py"
    child.write_text(SLOW_CHILD)
    monkeypatch.setattr("megarl.rollout.gateway.reply_parser.CHILD", child)
    monkeypatch.chdir(tmp_path)
    parser = SglangParser(tool_parser="qwen25", reasoning_parser=None)
    assert (await parser.parse("a", [])).content == "a"
    slow = asyncio.ensure_future(parser.parse("slow", []))
    await wait_for(Path("begun").exists)
    slow.cancel()
    Path("go").touch()
    assert (await parser.parse("b", [])).content == "b"
    await parser.close()
