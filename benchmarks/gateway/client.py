"""The client of the benchmark: talks in all sessions at once and prints the seconds of each turn, by session."""

import asyncio
import json
import random
import sys
import time
from typing import Any

import aiohttp


async def main() -> None:
    """Read the sessions from stdin."""
    given = json.load(sys.stdin)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        talks = [talk(http, url, given["turns"], given["spread"]) for url in given["urls"]]
        print(json.dumps(await asyncio.gather(*talks)))


async def talk(http: aiohttp.ClientSession, url: str, turns: int, spread: float) -> list[float]:
    """Return the seconds of each turn; sessions begin at different times, as they do in a run."""
    await asyncio.sleep(random.uniform(0, spread))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a question of some words " * 8}]
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        async with http.post(f"{url}/chat/completions", json={"model": "m", "messages": messages}) as response:
            reply = (await response.json())["choices"][0]["message"]
        seconds.append(time.perf_counter() - start)
        messages += [reply, {"role": "user", "content": "and then? " * 8}]
        await asyncio.sleep(random.uniform(0, spread / 4))
    return seconds


asyncio.run(main())
