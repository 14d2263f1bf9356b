"""Runs tasks that arrive on stdin as JSON lines, many at the same time, and answers each with a line on stdout."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TextIO

Solve = Callable[..., Awaitable[None]]


def serve(solve: Solve) -> None:
    """Call the async function `solve(task, base_url, api_key)` for each task, until stdin ends."""
    asyncio.run(read_tasks(solve))


async def read_tasks(solve: Solve) -> None:
    """Start a task for each line `{id, task, base_url, api_key}`, and cancel that of each line `{id}`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the framework prints is no answer
    running: dict[int, asyncio.Task[None]] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        number = request.pop("id")
        if request:
            running[number] = asyncio.create_task(answer(solve, number, request, answers))
            running[number].add_done_callback(lambda _, number=number: running.pop(number))
        elif number in running:
            running[number].cancel()


async def answer(solve: Solve, number: int, request: dict[str, Any], answers: TextIO) -> None:
    """Run a task and write `{id, error}`; the error is null if it succeeds."""
    error = None
    try:
        await solve(**request)
    except Exception as e:  # noqa: BLE001 -- the framework may raise anything, which fails this episode alone
        error = f"{type(e).__name__}: {e}"
    answers.write(json.dumps({"id": number, "error": error}) + "\n")
    answers.flush()
