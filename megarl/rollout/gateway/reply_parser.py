"""Splits the text of a reply into thoughts, content and tool calls, by SGLang's parsers.

    rollout worker                          child process (reply_parser_child.py)
    parse(text, tools)    -- JSON line -->  ReasoningParser, FunctionCallParser
                          <-- JSON line --

On a node without CUDA, SGLang is imported with stub modules, which no other process may see.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import WorkerError
from megarl.process.descendants import make_preexec
from megarl.rollout.environments.environment import Message
from megarl.rollout.sglang.engine_environment import make_engine_environment

CHILD = Path(__file__).with_name("reply_parser_child.py")

START_TIMEOUT_SECONDS = 300.0
"""Timeout for the start of the child process, which imports SGLang."""

TIMEOUT_SECONDS = 30.0
"""Timeout for one reply."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a reply makes."""

    name: str
    arguments: str
    """As JSON."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply as clients see it."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ReplyParser(Protocol):
    """Splits replies."""

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        """Return the parts of a reply; `tools` are the functions that it may call."""
        ...

    async def close(self) -> None:
        """Release what the parser holds."""
        ...


class PlainTextParser:
    """Takes the whole reply as its content."""

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        """Return the text as content."""
        return ParsedReply(text)

    async def close(self) -> None:
        """Do nothing."""


class SglangParser:
    """Splits replies by SGLang's parsers, in a child process that starts with the first reply.

    A reply without a call that can be parsed, such as one of an unknown function, is content as a whole.
    """

    def __init__(self, *, tool_parser: str | None, reasoning_parser: str | None) -> None:
        """Use the parsers of these names, as SGLang's options `--tool-call-parser` and `--reasoning-parser` do."""
        self._names = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reply-parser")
        """Reads the child's answer also if the caller is cancelled, so that the next one belongs to the next line."""

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        """Return the parts of a reply.

        Raises:
            WorkerError: the child process died, does not know a parser, or took longer than its timeout.
        """
        line = {"text": text, "tools": list(tools)}
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, line)
        calls = tuple(ToolCall(name, arguments) for name, arguments in found["calls"])
        return ParsedReply(found["content"], found["reasoning"], calls)

    async def close(self) -> None:
        """Kill the child process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await asyncio.to_thread(child.wait)

    def _start(self) -> subprocess.Popen[bytes]:
        device = "cpu" if importlib.util.find_spec("triton") is None else "cuda"
        return subprocess.Popen(  # noqa: S603 -- this interpreter and a script of this package
            [sys.executable, "-P", str(CHILD)],
            env={**os.environ, **make_engine_environment(device, 1)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=make_preexec(signal.SIGKILL),
        )

    def _answer(self, line: object) -> dict[str, Any]:
        """Return the child's answer to a line; starts it if it does not run."""
        if self._child is None:
            self._child = self._start()
            self._exchange(self._child, self._names, START_TIMEOUT_SECONDS)
        return self._exchange(self._child, line, TIMEOUT_SECONDS)

    def _exchange(self, child: subprocess.Popen[bytes], line: object, timeout_seconds: float) -> dict[str, Any]:
        reply = _exchange(child, line, timeout_seconds)
        if reply is None:
            self._child = None
            raise WorkerError(f"the process of SGLang's parsers {self._names} died or took too long (see above)")
        if "error" in reply:
            raise WorkerError(f"SGLang's parsers {self._names} failed: {reply['error']}")
        return reply


def find_tool_parsers() -> list[str] | None:
    """Return the names of SGLang's parsers for tool calls; None if SGLang is not installed. Does not import SGLang."""
    return _read_names("function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES")


def find_reasoning_parsers() -> list[str] | None:
    """Return the names of SGLang's parsers for thoughts; None if SGLang is not installed. Does not import SGLang."""
    return _read_names("parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES")


def _read_names(file: str, name: str) -> list[str] | None:
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return None
    names: list[str] = runpy.run_path(str(Path(package.origin).parent / "srt" / file))[name]
    return names


def _exchange(child: subprocess.Popen[bytes], line: object, timeout_seconds: float) -> dict[str, Any] | None:
    """Send a line and return the one that the child answers; None: it was killed by the timeout, or has died."""
    assert child.stdin is not None
    assert child.stdout is not None
    timer = threading.Timer(timeout_seconds, child.kill)
    timer.start()
    try:
        child.stdin.write(json.dumps(line).encode() + b"\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = b""
    finally:
        timer.cancel()
    if not answer:
        child.kill()
        child.wait()
        return None
    found: dict[str, Any] = json.loads(answer)
    return found
