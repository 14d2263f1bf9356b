"""Splits the text of a reply into thoughts, content and tool calls, by SGLang's parsers.

    rollout worker                          child process (reply_parser_child.py)
    parse(text, tools)    -- JSON line -->  ReasoningParser, FunctionCallParser
                          <-- JSON line --

The policy writes the text, so whatever it does to a parser (an exception, a crash, a time-out) is an outcome of the
text: the reply is content as a whole. Only a child process that does not start is an error.

On a node without CUDA, SGLang is imported with stub modules, which no other process may see.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ValidationError

from megarl.cluster.process.child_processes import make_preexec
from megarl.engines.sglang.engine_environment import make_engine_environment
from megarl.errors import WorkerError
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.turn_request import parse_arguments
from megarl.text import escape_controls, replace_surrogates

logger = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("reply_parser_child.py")

START_TIMEOUT_SECONDS = 300.0
"""Timeout for the start of the child process, which imports SGLang."""

PROBED_TOOL: Message = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
"""Function of the empty reply with which the child process is started."""

TIMEOUT_SECONDS = 30.0
"""Timeout for one reply, after which its text is content as a whole."""


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
    """Splits a reply of the policy into content, reasoning and calls."""

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
        """Do nothing: there is no process to end."""


class _Answer(BaseModel):
    """What the child process says of a reply; `error`: what a parser raised."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    """Name and arguments of each."""
    error: str | None = None


class SglangParser:
    """Splits replies by SGLang's parsers, in a child process that starts with the first reply.

    A reply without a valid call of a known function is content as a whole, and so is one that a parser fails on. A
    child process that dies or hangs is replaced with the next reply.
    """

    def __init__(self, *, tool_parser: str | None, reasoning_parser: str | None) -> None:
        """Use the parsers of these names, as SGLang's options `--tool-call-parser` and `--reasoning-parser` do."""
        self._names = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        self.child: subprocess.Popen[bytes] | None = None
        """The process that parses; None before the first reply, and after it was stopped or lost."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reply-parser")
        """Reads the child's answer also if the caller is cancelled, so that the next one belongs to the next line."""
        self.num_failed = 0
        """Number of replies that a parser failed on."""

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        """Return the parts of a reply.

        Raises:
            WorkerError: the child process does not start, or does not know a parser.
        """
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, text, list(tools))
        if found.error is not None:
            self.num_failed += 1
            level = logging.WARNING if self.num_failed == 1 else logging.DEBUG
            logger.log(
                level,
                "SGLang's parsers %s failed on a reply, which is returned as text, as further ones will be: %s",
                self._names,
                escape_controls(replace_surrogates(found.error)),
            )
            return ParsedReply(replace_surrogates(text))
        known = {tool["function"]["name"] for tool in tools}
        calls = tuple(_valid_calls(found.calls, known))
        if not calls and (found.calls or not (found.content or found.reasoning)):
            return ParsedReply(replace_surrogates(text))
        return ParsedReply(replace_surrogates(found.content), replace_surrogates(found.reasoning), calls)

    async def close(self) -> None:
        """Kill the child process."""
        child, self.child = self.child, None
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

    def _answer(self, text: str, tools: list[Message]) -> _Answer:
        """Return the child's answer for a reply; starts it if it does not run."""
        if self.child is None:
            child = self._start()
            started = _exchange(child, {"text": "", "tools": [PROBED_TOOL], **self._names}, START_TIMEOUT_SECONDS)
            if started is None:
                raise WorkerError(f"the process of SGLang's parsers {self._names} did not start (see above)")
            if started.error is not None:  # such as an unknown name
                child.kill()
                raise WorkerError(f"SGLang's parsers {self._names} cannot be used: {started.error}")
            self.child = child
        found = _exchange(self.child, {"text": text, "tools": tools, **self._names}, TIMEOUT_SECONDS)
        if found is None:
            self.child = None
            return _Answer(error=f"the process died, or took longer than {TIMEOUT_SECONDS:g} s")
        return found


def _valid_calls(calls: Sequence[tuple[str, str]], known: Collection[str]) -> Iterator[ToolCall]:
    """Yield the calls of known functions whose arguments are a JSON object; no arguments are an empty one."""
    for name, arguments in calls:
        if name in known and isinstance(parse_arguments(arguments.strip() or "{}"), dict):
            yield ToolCall(name, replace_surrogates(arguments.strip() or "{}"))


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


def _exchange(child: subprocess.Popen[bytes], line: object, timeout_seconds: float) -> _Answer | None:
    """Send a line and return the answer; None: the child was killed by the timeout, or has died."""
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
    if not answer.endswith(b"\n"):  # it may have died in the middle of a line
        child.kill()
        child.wait()
        return None
    try:
        return _Answer.model_validate(json.loads(answer))
    except ValidationError as e:  # parsers return names and arguments that are no texts
        return _Answer(error=str(e.errors(include_input=False, include_url=False)[0]))
