"""Requests that are being sampled when their episode ends: the engine is told to abort them, and only these."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from megarl.errors import WorkerError
from megarl.rollout.batching_engine import BatchingEngine
from megarl.rollout.continuation import no_tokens
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway import harness_agent
from megarl.rollout.gateway.reply_parser import SglangParser
from megarl.rollout.gateway.turn_request import TurnRequest
from megarl.rollout.rollout_worker import GroupSummary
from tests.rollout.clock import in_event_loop, jump
from tests.rollout.gateway.clients import ask_raw
from tests.rollout.gateway.scripted import SeededEngine, make_agent, make_prompt, make_session, run_groups
from tests.rollout.gateway.test_programs import ASK
from tests.time_limits import UNREACHED_SECONDS

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


def run_group(engine: EndlessEngine, agent: Any) -> Any:
    """Run a group of one episode, after which no request is in flight; return its summary or error."""
    engines.append(engine)
    prompt = make_prompt(engine.tokenizer, text=QUICK)
    try:
        ((summary, _),) = run_groups(engine, agent, [prompt], seconds=2 * UNREACHED_SECONDS)
    except WorkerError as e:
        return e
    return summary


engines: list[EndlessEngine] = []
"""Those of all groups, the current one last."""


async def begin(base_url: str, text: str, num: int = 1) -> list[asyncio.Task[str]]:
    """Ask so many questions; the engine is sampling the answers when this returns."""
    asked = [
        asyncio.ensure_future(ask_raw(base_url, "", [{"role": "user", "content": f"{text} {n}"}])) for n in range(num)
    ]
    await asyncio.sleep(0.1)  # in which also a question that the engine is sampling already may arrive
    while len(engines[-1].in_flight) < num:
        await asyncio.sleep(0.01)
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
    await begin(base_url, LONG)
    jump(3 * UNREACHED_SECONDS)
    await asyncio.sleep(1e6)


def test_a_request_that_a_program_has_left_is_aborted_at_its_end(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, disconnect_and_return))
    assert engine.aborted == ["step-1-0-0.1"]
    assert summary.kept == (0,)  # the first turn is trained on
    assert summary.trajectories[0].num_turns == len(engine.log) == 1


def test_the_requests_of_a_program_that_fails_are_aborted_in_both_attempts(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, disconnect_and_raise))
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


def test_requests_are_aborted_when_a_program_does_not_end_after_a_limit(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness_agent, "END_SECONDS", 0.1)
    engine = EndlessEngine(tokenizer)
    summary = run_group(engine, make_agent(tokenizer, go_on_after_a_limit, max_turns=2))
    assert summary.trajectories[0].finish_reason == "turns"
    assert engine.aborted == ["step-1-0-0", "step-1-0-0.1"]


def test_requests_are_aborted_once_when_the_episode_times_out(tokenizer: Any) -> None:
    engine = EndlessEngine(tokenizer)
    error = run_group(engine, make_agent(tokenizer, wait_for_ever, max_seconds=1e6))
    assert isinstance(error, WorkerError)
    assert f"did not finish within {2 * UNREACHED_SECONDS} s" in str(error)
    assert engine.aborted == ["step-1-0-0"]


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


closed: list[asyncio.Event] = []
late: list[httpx.Response] = []
sending: list[asyncio.Task[None]] = []


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
        batching: Any = BatchingEngine(engine)
        batching.tokenizer = tokenizer
        session = make_session(batching, 0)
        request = TurnRequest(messages=({"role": "user", "content": LONG},))
        asked = asyncio.ensure_future(session.answer(request))
        for _ in range(iterations):
            await asyncio.sleep(0)
        is_sent = bool(engine.in_flight)
        await session.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.in_flight == {}
        with pytest.raises(asyncio.CancelledError):
            await asked
        return is_sent, len(engine.aborted)

    found = [asyncio.run(sent_and_aborted(iterations)) for iterations in range(1, 12)]
    assert found[0] == (False, 0)
    assert found[-1] == (True, 1)


SLOW_CHILD = """
import json, os, sys, time
sys.stdin.readline()
print("{}", flush=True)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "slow":
        open("begun", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    print(json.dumps({"content": text, "reasoning": "", "calls": []}), flush=True)
"""


@in_event_loop
async def test_the_answer_for_a_cancelled_caller_is_not_taken_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(SLOW_CHILD)
    monkeypatch.setattr("megarl.rollout.gateway.reply_parser.CHILD", child)
    monkeypatch.chdir(tmp_path)
    parser = SglangParser(tool_parser="qwen25", reasoning_parser=None)
    assert (await parser.parse("a", [])).content == "a"
    slow = asyncio.ensure_future(parser.parse("slow", []))
    while not Path("begun").exists():
        await asyncio.sleep(0.01)
    slow.cancel()
    Path("go").touch()
    assert (await parser.parse("b", [])).content == "b"
    await parser.close()
