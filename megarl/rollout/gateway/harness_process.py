"""What runs an episode against the gateway: a command in a process group of its own, or an async function."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from megarl.batch.trajectory import MAX_REWARD
from megarl.cluster.process.atomic_files import LOG_TAIL_LINES, tail
from megarl.cluster.process.child_processes import make_preexec
from megarl.config.rollout import HarnessConfig
from megarl.config.section import load_object
from megarl.errors import ConfigError
from megarl.rollout.environments.conversation import EnvironmentFailedError
from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway.reply_parser import find_reasoning_parsers, find_tool_parsers
from megarl.text import describe_error, text_of
from megarl.user_code import await_outcome, read_number

HARNESS = "rollout.harness"
"""YAML key of the section."""

Function = Callable[..., Awaitable[Any]]

GRACE_SECONDS = 2.0
"""How long the processes of a program may take after SIGTERM, before they are killed."""

POLL_SECONDS = 0.05

NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this process that would break the program's own Python installation; also those of Ray."""


def check_harness(config: HarnessConfig) -> Function | None:
    """Return the function after checking its signature; None: the harness is a command, which exists.

    Raises:
        ConfigError: SGLang has no parser of a name, the program is not found, or the function cannot be imported or
            does not take the arguments.
    """
    _check_parser("tool_parser", config.tool_parser, find_tool_parsers())
    _check_parser("reasoning_parser", config.reasoning_parser, find_reasoning_parsers())
    if config.command is not None:
        if shutil.which(config.command[0]) is None:
            raise ConfigError(f"{HARNESS}.command: the program {config.command[0]!r} was not found on this node")
        return None
    assert config.path is not None
    function = load_object(config.path, key=f"{HARNESS}.path", kind="function")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{HARNESS}.path needs an async function, got {config.path} = {function!r}")
    try:
        inspect.signature(function).bind(None, "base_url", "api_key", **config.kwargs)
    except TypeError as e:
        raise ConfigError(
            f"{HARNESS}.path: {config.path}{inspect.signature(function)} needs to take task, base_url, api_key and "
            f"{HARNESS}.kwargs: {e}"
        ) from e
    return cast("Function", function)


async def run_function(
    function: Function, config: HarnessConfig, task: Task, base_url: str, api_key: str
) -> float | None:
    """Run the function and return its reward, if it returns one.

    Raises:
        EnvironmentFailedError: it raised an exception, or returned something else than a finite reward.
    """
    result, error = await await_outcome(partial(function, task, base_url, api_key, **config.kwargs))
    if error is not None:
        raise EnvironmentFailedError(f"{HARNESS}.path ({config.path}) raised {describe_error(error)}") from error
    return read_reward(result, f"{HARNESS}.path ({config.path})")


async def run_command(
    config: HarnessConfig, task: Mapping[str, Any], base_url: str, api_key: str, host: str
) -> float | None:
    """Run the command and return the reward that it writes to the file `RESULT_FILE`, if any.

    Its processes have ended when this returns, also if it is cancelled.

    Args:
        task: is written as JSON to its stdin.
        host: that of the base URL, to which no proxy is used.

    Raises:
        EnvironmentFailedError: it could not be started, ended with an exit code other than 0, or wrote no valid reward.
    """
    assert config.command is not None
    label = f"{HARNESS}.command ({config.label})"
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps({**task, "kwargs": config.kwargs}, default=str))
        inherited = {key: value for key, value in os.environ.items() if not _is_own(key)}
        no_proxy = ",".join(filter(None, [inherited.get("NO_PROXY"), host]))
        environment = inherited | {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": "policy",
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "RESULT_FILE": str(folder / "result.json"),
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
            **config.env,
        }
        with (folder / "task.json").open() as stdin, (folder / "output.log").open("wb") as output:
            try:
                process = subprocess.Popen(  # noqa: S603 -- the user's command
                    config.command,
                    env=environment,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=make_preexec(signal.SIGKILL),
                )
            except OSError as e:
                raise EnvironmentFailedError(f"{label} could not be started: {e}") from e
        try:
            while not _has_ended(process):
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await asyncio.shield(asyncio.to_thread(_end_processes, process, api_key))
        if process.returncode:
            lines = "\n".join(tail(folder / "output.log").splitlines()[-LOG_TAIL_LINES:])
            raise EnvironmentFailedError(f"{label} ended with exit code {process.returncode}: {lines}")
        return _read_result(folder / "result.json", label)


def read_reward(result: object, label: str) -> float | None:
    """Return the reward that a harness gives: a number, or a mapping with the key `reward`; None: none.

    Raises:
        EnvironmentFailedError: it is something else, or not finite.
    """
    value = result.get("reward") if isinstance(result, Mapping) else result
    if value is None:
        return None
    reward = read_number(value)
    if reward is not None and abs(reward) <= MAX_REWARD:
        return reward
    raise EnvironmentFailedError(f"{label} needs to return a finite reward up to 1e18, or none, got {text_of(value)}")


def _read_result(file: Path, label: str) -> float | None:
    if not file.exists():
        return None
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise EnvironmentFailedError(f"{label} wrote no JSON to RESULT_FILE: {describe_error(e)}") from e
    return read_reward(result, label)


def _check_parser(key: str, name: str | None, known: Sequence[str] | None) -> None:
    if name is not None and known is not None and name not in known:
        raise ConfigError(f"{HARNESS}.{key} needs one of {', '.join(known)}, got {name!r}")


def _is_own(variable: str) -> bool:
    return variable in NOT_INHERITED or variable.startswith("RAY_")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended; it stays a zombie, so that no other process group gets its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_processes(process: subprocess.Popen[bytes], api_key: str) -> None:
    """End the process, its group, and all processes that have inherited its API key; return when they have ended."""
    deadline = time.monotonic() + GRACE_SECONDS
    _send(signal.SIGTERM, _find_processes(process.pid, api_key))
    while time.monotonic() < deadline and _find_processes(process.pid, api_key):
        time.sleep(POLL_SECONDS)
    while living := _find_processes(process.pid, api_key):  # also those that a process has started meanwhile
        _send(signal.SIGKILL, living)
        time.sleep(POLL_SECONDS)
    process.wait()


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _find_processes(group: int, api_key: str) -> list[int]:
    """Return the pids of running processes of the group, or with the key in their environment, as daemons have it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            state, _, process_group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if state not in b"ZX" and (
                int(process_group) == group or api_key.encode() in (folder / "environ").read_bytes()
            ):
                found.append(int(folder.name))
    return found
