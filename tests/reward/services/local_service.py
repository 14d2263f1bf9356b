"""A reward service and a judge with scripted faults, in virtual time or on the loopback interface."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar

import httpx
import pytest
from aiohttp import web

from tests.virtual_time import run_in_virtual_time

T = TypeVar("T")
URL = "http://service"


@dataclass
class Faults:
    """Shares of the requests that go wrong, decided by a seeded generator."""

    error: float = 0.0
    """Answered with a status 500, 502, 503 or 429."""
    hang: float = 0.0
    """Not answered."""
    slow: float = 0.0
    """Answered after 0.1 s."""
    random: Random = field(default_factory=lambda: Random(0))

    def next(self) -> str:
        draw = self.random.random()
        for name, share in (("error", self.error), ("hang", self.hang), ("slow", self.slow)):
            if draw < share:
                return name
            draw -= share
        return "good"


@dataclass
class LocalService:
    """Answers POST requests with what `answer` returns for their JSON body."""

    answer: Callable[[Any], Any]
    """Returns the answer, or an `httpx.Response`."""
    faults: Faults = field(default_factory=Faults)
    requests: list[Any] = field(default_factory=list)
    """Bodies of all requests."""
    headers: list[httpx.Headers] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """How requests were handled."""
    num_concurrent: int = 0
    max_concurrent: int = 0

    async def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body)
        self.headers.append(request.headers)
        kind = self.faults.next()
        self.kinds[kind] += 1
        self.num_concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self.num_concurrent)
        try:
            match kind:
                case "error":
                    return httpx.Response(self.faults.random.choice([500, 502, 503, 429]), text="overloaded")
                case "hang":
                    await asyncio.get_running_loop().create_future()
                case "slow":
                    await asyncio.sleep(0.1)
            found = self.answer(body)
            return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)
        finally:
            self.num_concurrent -= 1

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work` in virtual time; httpx clients that it makes get their answers from here."""

        async def main() -> T:
            return await work()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(self.handle)))
            return run_in_virtual_time(main())

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Yield the address of the service on the loopback interface."""

        async def respond(request: web.Request) -> web.Response:
            asked = httpx.Request("POST", str(request.url), headers=request.headers, content=await request.read())
            response = await self.handle(asked)
            return web.Response(status=response.status_code, body=response.content)

        app = web.Application()
        app.router.add_post("/{path:.*}", respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
