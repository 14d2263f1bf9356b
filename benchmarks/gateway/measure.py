"""Sessions that a client in another process runs against a gateway, and what they cost."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from aiohttp import web
from numpy.typing import NDArray

from megarl.batch.trajectory import Prompt
from megarl.cluster.process.process_start import freeze_objects
from megarl.config.rollout import HarnessConfig
from megarl.data.tiny_checkpoint import CHAT_TEMPLATE, train_tokenizer
from megarl.engines.engine import Generation, GenerationRequest, Sampling
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.gateway.reply_parser import PlainTextParser
from megarl.rollout.gateway.server import GatewayServer
from megarl.rollout.gateway.session import Session

CLIENT = Path(__file__).with_name("client.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sessions that run at the same time."""

    num_sessions: int
    num_turns: int
    engine_seconds: float
    """Time that the engine takes for a turn, in which it does nothing."""
    reply_tokens: int = 100


@dataclass
class WaitingEngine:
    """Waits, and returns the same tokens each time; knows when each turn was sampled."""

    load: Load
    spent: dict[str, float] = field(default_factory=dict)
    """Duration of each request, by its id."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return tokens after a wait."""
        start = time.perf_counter()
        await asyncio.sleep(self.load.engine_seconds)
        count = self.load.reply_tokens
        self.spent[request.request_id] = time.perf_counter() - start
        return Generation(
            token_ids=np.full(count, 40, np.int32),
            logprobs=np.full(count, -0.5, np.float32),
            policy_versions=np.zeros(count, np.int32),
            finish_reason="stop",
        )

    async def abort(self, request_id: str) -> None:
        """Do nothing."""


async def measure(load: Load) -> dict[str, Any]:
    """Return the milliseconds that each turn takes longer than its engine, CPU time of this process, and memory."""
    tokenizer = train_tokenizer(["some text to talk about"] * 3, 330, 1 << 20)
    tokenizer.chat_template = CHAT_TEMPLATE
    engine, server = WaitingEngine(load), GatewayServer(tokenizer)
    await server.start()
    renderer, parser = ChatRenderer(tokenizer, date(2026, 1, 31)), PlainTextParser()
    await _run(Load(num_sessions=4, num_turns=2, engine_seconds=0.01), engine, server, renderer, parser, tokenizer)
    engine.spent.clear()
    freeze_objects(collect=True)  # as the process does that has the gateway in a run
    before = _usage()
    sessions, seconds = await _run(load, engine, server, renderer, parser, tokenizer)
    usage = _usage() - before
    added = [
        took - engine.spent[f"r-{session}.{turn}" if turn else f"r-{session}"]
        for session, turns in enumerate(seconds)
        for turn, took in enumerate(turns)
    ]
    await server.close()
    assert sum(session.num_turns for session in sessions) == load.num_sessions * load.num_turns
    return _summary(load, added, usage)


async def measure_http(load: Load) -> dict[str, Any]:
    """Return what `measure` does, for a server that waits and answers each request of the client with the same text."""
    waited: list[list[float]] = [[] for _ in range(load.num_sessions)]
    reply = {"choices": [{"message": {"role": "assistant", "content": "a word of " * (load.reply_tokens // 2)}}]}

    async def answer(request: web.Request) -> web.Response:
        await request.json()
        start = time.perf_counter()
        await asyncio.sleep(load.engine_seconds)
        waited[int(request.match_info["session"])].append(time.perf_counter() - start)
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/{session}/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    before = _usage()
    seconds = await _talk([f"{site.name}/{session}" for session in range(load.num_sessions)], load)
    usage = _usage() - before
    await runner.cleanup()
    added = [
        each - wait
        for turns, waits in zip(seconds, waited, strict=True)
        for each, wait in zip(turns, waits, strict=True)
    ]
    return _summary(load, added, usage)


def _usage() -> NDArray[np.float64]:
    """Return the CPU seconds of this process and its resident bytes."""
    return np.array([time.process_time(), psutil.Process().memory_info().rss])


def _summary(load: Load, added: Sequence[float], usage: NDArray[np.float64]) -> dict[str, Any]:
    """Return the result from the seconds added to each turn, and the CPU seconds and bytes of all of them."""
    cpu, memory = usage.tolist()
    return {
        **asdict(load),
        "added_ms_p50": 1e3 * float(np.percentile(added, 50)),
        "added_ms_p99": 1e3 * float(np.percentile(added, 99)),
        "cpu_ms_per_turn": 1e3 * cpu / (load.num_sessions * load.num_turns),
        "rss_growth_mib": memory / 2**20,
    }


async def _run(
    load: Load,
    engine: WaitingEngine,
    server: GatewayServer,
    renderer: ChatRenderer,
    parser: PlainTextParser,
    tokenizer: Any,
) -> tuple[Sequence[Session], list[list[float]]]:
    """Return the sessions, and the seconds of each turn of each session as the client measures them."""
    prompt = Prompt(prompt_id="d.jsonl:1", text="", token_ids=(40,) * 20, row={})
    sampling = Sampling(temperature=1.0, max_new_tokens=1 << 20)
    sessions, urls, stack = [], [], []
    for number in range(load.num_sessions):
        episode = Episode(prompt, tokenizer, engine, sampling, request_id=f"r-{number}", group_id=0)
        config = HarnessConfig(path="a:b", max_turns=load.num_turns, max_seconds=1e6)
        session = Session(episode, config, renderer, parser, can_call=False)
        served = server.serve(session)
        urls.append(served.__enter__()[0])
        sessions.append(session)
        stack.append(served)
    seconds = await _talk(urls, load)
    for served in stack:
        served.__exit__(None, None, None)
    return sessions, seconds


async def _talk(urls: Sequence[str], load: Load) -> list[list[float]]:
    """Return the seconds of each turn of each session, as a client in another process measures them."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    sent = {"urls": urls, "turns": load.num_turns, "spread": load.engine_seconds}
    output, _ = await child.communicate(json.dumps(sent).encode())
    assert child.returncode == 0
    seconds: list[list[float]] = json.loads(output)
    return seconds
