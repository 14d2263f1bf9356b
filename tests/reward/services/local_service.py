"""A reward service and a judge on the loopback interface, with scripted faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import web

HANG_SECONDS = 30.0


@dataclass
class Faults:
    """Shares of the requests that go wrong, decided by a seeded generator."""

    error: float = 0.0
    """Answered with a status 500, 502, 503 or 429."""
    hang: float = 0.0
    """Not answered."""
    slow: float = 0.0
    slow_seconds: float = 0.1
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
    """Returns the answer, or a `web.Response`."""
    faults: Faults = field(default_factory=Faults)
    requests: list[Any] = field(default_factory=list)
    """Bodies of all requests."""
    headers: list[dict[str, str]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """How requests were handled."""
    num_concurrent: int = 0
    max_concurrent: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        kind = self.faults.next()
        self.kinds[kind] += 1
        self.num_concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self.num_concurrent)
        try:
            match kind:
                case "error":
                    return web.Response(status=self.faults.random.choice([500, 502, 503, 429]), text="overloaded")
                case "hang":
                    await asyncio.sleep(HANG_SECONDS)
                case "slow":
                    await asyncio.sleep(self.faults.slow_seconds)
            found = self.answer(body)
            return found if isinstance(found, web.StreamResponse) else web.json_response(found)
        finally:
            self.num_concurrent -= 1

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Yield the address of the service; it ends with the block, without waiting for requests that hang."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self.url
        finally:
            await runner.cleanup()
