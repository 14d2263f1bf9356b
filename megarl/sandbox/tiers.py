"""Which kinds of sandboxes a machine has, the choice among them, and the client of those behind HTTP.

    POST URL/run                  {"source", "setup", "cases": [{"stdin"} or {"call"}, ...], "limits", "seconds"}
                                  -> {"outcomes": [{"status", "stdout", "stderr", "value"}, ...]}
    POST URL/interpreters         {"limits"}  -> {"id"}
    POST URL/interpreters/ID      {"source"}  -> {"status", "stdout", "stderr", "value"}
    DELETE URL/interpreters/ID

The service runs a program once for each case, without the others, and gives cases that `seconds` do not suffice for the
status `timeout`. Any HTTP status but 200 is a failure of the service, and never one of the program.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx

from megarl.config.reward import SandboxConfig
from megarl.errors import ConfigError, SandboxError
from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.launcher.containers import MIN_VERSION
from megarl.sandbox.sandbox import Case, Interpreter, Outcome, Program, Sandbox, read_outcome
from megarl.sandbox.session import PROGRAMS, ForkServer, Session

GRACE_SECONDS = 30.0
"""Time for starting sandboxes and for the network, beside the programs' own."""


class ServiceSandbox:
    """Runs programs by a service; see `Sandbox`."""

    def __init__(self, url: str, limits: Limits) -> None:
        self._url, self._limits = url.rstrip("/"), limits
        self._client = httpx.Client(trust_env=False, follow_redirects=False)

    def run(self, program: Program, *, until: Callable[[int, Outcome], bool] | None = None) -> list[Outcome]:
        """Return the outcomes of the program's cases; as `Sandbox.run`, but the service always runs all cases."""
        cases = [{"stdin": case.stdin} if case.call is None else {"call": case.call} for case in program.cases]
        limits = self._limits.enlarged(output_bytes=program.output_bytes, input_bytes=0)
        seconds = min(program.seconds, self._limits.wall_seconds * len(cases))
        body: dict[str, Any] = {"source": program.source, "setup": program.setup, "cases": cases}
        body |= {"limits": limits.as_dict(), "seconds": seconds}
        answer = self.request("POST", "run", body, seconds=seconds)
        outcomes = answer.get("outcomes")
        if not isinstance(outcomes, list) or len(outcomes) != len(cases):
            raise SandboxError(f"{self._url}/run needs to return {len(cases)} outcomes, got {str(answer)[:200]}")
        found = [_outcome(outcome, self._url, limits) for outcome in outcomes]
        last = next((i for i, outcome in enumerate(found) if until is not None and until(i, outcome)), len(found))
        return found[: last + 1]

    def open_interpreter(self) -> Interpreter:
        """Start an interpreter; as `Sandbox.open_interpreter`."""
        answer = self.request("POST", "interpreters", {"limits": self._limits.as_dict()}, seconds=0)
        if not isinstance(answer.get("id"), str):
            raise SandboxError(f"{self._url}/interpreters needs to return an id, got {str(answer)[:200]}")
        return _ServiceInterpreter(self, quote(answer["id"], safe=""))

    def close(self) -> None:
        """Close the connections to the service."""
        self._client.close()

    def request(self, method: str, path: str, body: dict[str, Any] | None, *, seconds: float) -> dict[str, Any]:
        """Return the JSON object of an answer.

        Args:
            method: method of the request.
            path: path below the URL.
            body: the request.
            seconds: time that programs of the request may take.

        Raises:
            SandboxError: the service cannot be reached, or answers with another status or with something else.
        """
        url = f"{self._url}/{path}"
        content = None if body is None else json.dumps(body).encode()  # escapes surrogates, which httpx does not
        timeout = seconds + GRACE_SECONDS
        deadline = time.monotonic() + timeout
        data = bytearray()
        try:
            headers = {"Content-Type": "application/json"}
            with self._client.stream(method, url, content=content, headers=headers, timeout=timeout) as response:
                for chunk in response.iter_bytes():
                    data += chunk
                    if time.monotonic() > deadline:
                        raise SandboxError(f"the sandbox service {url} takes longer than {timeout:g} s")
        except httpx.HTTPError as e:
            raise SandboxError(f"the sandbox service {url} failed: {type(e).__name__}: {e}") from e
        if response.status_code != 200:
            raise SandboxError(f"the sandbox service {url} returned status {response.status_code}, needs 200")
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as e:
            text = data[:200].decode(errors="replace")
            raise SandboxError(f"the sandbox service {url} needs to return JSON, got {text!r}") from e
        if not isinstance(answer, dict):
            raise SandboxError(f"the sandbox service {url} needs to return an object, got {str(answer)[:200]}")
        return answer

    def cell(self, number: str, source: str) -> Outcome:
        """Return the outcome of a cell of an interpreter."""
        path = f"interpreters/{number}"
        answer = self.request("POST", path, {"source": source}, seconds=self._limits.wall_seconds)
        return _outcome(answer, self._url, self._limits)


class _ServiceInterpreter:
    """An interpreter of a service; see `Interpreter`."""

    def __init__(self, service: ServiceSandbox, number: str) -> None:
        self._service, self._number = service, number

    def run(self, source: str) -> Outcome:
        """Return the outcome of a cell; as `Interpreter.run`."""
        return self._service.cell(self._number, source)

    def close(self) -> None:
        """End the interpreter in the service."""
        self._service.request("DELETE", f"interpreters/{self._number}", None, seconds=0)


def _outcome(answer: object, url: str, limits: Limits) -> Outcome:
    """Return an outcome of an answer.

    Raises:
        SandboxError: it is none.
    """
    try:
        outcome = read_outcome(answer)
    except ValueError as e:
        raise SandboxError(f"{url} needs to return outcomes with a status, got {str(answer)[:200]}") from e
    for name in ("stdout", "stderr", "value"):
        if len(getattr(outcome, name)) > limits.output_bytes + 1:
            raise SandboxError(f"{url} needs to return {name} of at most {limits.output_bytes} bytes, got more")
    return outcome


SEND_SECONDS = 20.0
MAX_BYTES_OF_CHARACTER = 4
"""Bytes of a character in UTF-8."""


@cache
def shared_fork_server() -> ForkServer:
    """Return the fork server of this process, which starts with its first sandbox and ends with this process."""
    return ForkServer()


class LocalSandbox:
    """Runs programs in a tier of this machine; see `Sandbox`."""

    def __init__(self, tier: str, limits: Limits, server: ForkServer | None = None) -> None:
        """Create a sandbox.

        Args:
            tier: `bubblewrap`, `launcher`, `runsc` or `unsafe`.
            limits: limits of each program or interpreter.
            server: fork server; None: the shared one.
        """
        self.tier, self._limits = tier, limits
        self._server = server or shared_fork_server()

    def run(self, program: Program, *, until: Callable[[int, Outcome], bool] | None = None) -> list[Outcome]:
        """Return the outcomes of the program's cases; as `Sandbox.run`.

        A sandbox runs cases until one leaves files or ends it; the next case has a new one.
        """
        bodies = [_case_body(program, case) for case in program.cases]
        input_bytes = max((len(body.get("stdin", "")) * MAX_BYTES_OF_CHARACTER for body in bodies), default=0)
        limits = self._limits.enlarged(output_bytes=program.output_bytes, input_bytes=input_bytes)
        session, outcomes = self._server.start(self.tier, limits), list[Outcome]()
        deadline = time.monotonic() + program.seconds
        is_clean = True
        try:
            for i, body in enumerate(bodies):
                seconds = min(self._limits.wall_seconds, deadline - time.monotonic())
                if seconds <= 0:
                    outcomes += [Outcome(status="timeout")] * (len(bodies) - i)
                    break
                if not is_clean:
                    session.close()
                    session = self._server.start(self.tier, limits)
                requests = {"kind": "case", "wall_seconds": seconds}, body
                outcome, is_clean = _ask(session, self.tier, *requests, seconds=seconds)
                outcomes.append(outcome)
                if until is not None and until(i, outcome):
                    break
        finally:
            session.close()
        return outcomes

    def open_interpreter(self) -> Interpreter:
        """Start an interpreter; as `Sandbox.open_interpreter`."""
        return LocalInterpreter(self._server, self.tier, self._limits)

    def close(self) -> None:
        """Do nothing: the shared fork server ends with this process."""


class LocalInterpreter:
    """An interpreter in a sandbox of this machine; see `Interpreter`."""

    def __init__(self, server: ForkServer, tier: str, limits: Limits) -> None:
        """Start the sandbox.

        Raises:
            SandboxError: it did not start.
        """
        self._server, self._tier, self._limits = server, tier, limits
        self._session: Session | None = server.start(tier, limits)

    def run(self, source: str) -> Outcome:
        """Return the outcome of a cell; as `Interpreter.run`."""
        if self._session is None:
            self._session = self._server.start(self._tier, self._limits)
        session, is_left = self._session, False
        try:
            request = {"kind": "cell", "source": source}
            outcome, is_left = _ask(session, self._tier, request, seconds=self._limits.wall_seconds)
        finally:
            if not is_left:
                self._session = None
        return outcome

    def close(self) -> None:
        """End the interpreter and all of its processes."""
        if self._session is not None:
            self._session.close()


def _case_body(program: Program, case: Case) -> dict[str, Any]:
    body = {"source": program.source, "setup": program.setup}
    return body | ({"stdin": case.stdin} if case.call is None else {"call": case.call})


def _ask(session: Session, tier: str, *requests: dict[str, Any], seconds: float) -> tuple[Outcome, bool]:
    """Return the outcome of a program or cell that has a limit of `seconds`, and whether the sandbox can run another.

    A sandbox that has ended, or does not report, has been brought to it by the program: its first process, the kernel
    or an overload has ended it. It is closed.

    Raises:
        SandboxError: its supervisor or the fork server has been killed, or its processes do not end.
    """
    try:
        session.send(*requests, seconds=SEND_SECONDS)
        reply = session.receive(seconds=seconds + GRACE_SECONDS)
        return read_outcome(reply), bool(reply.get("clean", True))
    except (EOFError, ValueError):
        outcome = Outcome(status="killed")
    except TimeoutError:
        outcome = Outcome(status="timeout")
    if session.close() is None:
        raise _lost(tier, "its supervisor has ended")
    return outcome, False


def _lost(tier: str, reason: str) -> SandboxError:
    return SandboxError(f"a sandbox of tier {tier} was lost: {reason}")


LOCAL_TIERS = ("bubblewrap", "launcher", "runsc")
"""Kinds of sandboxes of this machine, in the order of preference; runsc takes the most CPU time."""

PROBE_TEXT = "the sandbox works"


def find_local_tiers() -> dict[str, str | None]:
    """Return tier -> None where it works on this machine, else the reason why not; each is tried with a program."""
    return {tier: find_tier_problem(tier) for tier in LOCAL_TIERS}


def choose_tier(config: SandboxConfig, *, key: str) -> str:
    """Return the tier that a configuration leads to on this machine.

    Args:
        config: the section.
        key: its YAML path, for errors.

    Raises:
        ConfigError: the tier does not work here, or none does and `allow_unsafe` is not set.
    """
    if config.tier == "service":
        return "service"
    problems = list[str]()
    for tier in LOCAL_TIERS if config.tier == "auto" else (config.tier,):
        problem = find_tier_problem(tier)
        if problem is None:
            return tier
        problems.append(f"{tier}: {problem}")
    if config.allow_unsafe:
        return "unsafe"
    raise ConfigError(
        f"{key} needs a sandbox that works on this machine, or allow_unsafe: true, which runs programs with the rights "
        f"of this user; got none ({'; '.join(problems)})"
    )


def open_sandbox(config: SandboxConfig, *, key: str) -> Sandbox:
    """Return the sandbox of a configuration; arguments and errors as for `choose_tier`."""
    limits = Limits(
        wall_seconds=config.wall_seconds,
        cpu_seconds=config.cpu_seconds,
        memory_bytes=config.memory_mib * 2**20,
        disk_bytes=config.disk_mib * 2**20,
        max_processes=config.max_processes,
        output_bytes=config.output_kib * 2**10,
    )
    tier = choose_tier(config, key=key)
    if tier == "service":
        assert config.url is not None
        return ServiceSandbox(config.url, limits)
    return LocalSandbox(tier, limits)


@cache
def find_tier_problem(tier: str) -> str | None:
    """Return why a tier of `LOCAL_TIERS` does not work on this machine, found by a program; None: it does."""
    path = None
    if tier in PROGRAMS:
        path = shutil.which(PROGRAMS[tier])
        if path is None:
            return f"{PROGRAMS[tier]} is not installed (package {tier})"
    if path is not None and tier == "bubblewrap":
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split()  # noqa: S603
        version = tuple(int(part) for part in answer[-1].split(".")[:2]) if answer else (0, 0)
        if version < MIN_VERSION:
            return f"needs bwrap {'.'.join(map(str, MIN_VERSION))} or newer, got {'.'.join(map(str, version))}"
    server = ForkServer()
    try:
        program = Program(source=f"print({PROBE_TEXT!r})", cases=[Case()])
        outcome = LocalSandbox(tier, Limits(), server).run(program)[0]
    except SandboxError as e:
        return str(e)
    finally:
        server.close()
    return None if outcome.stdout.strip() == PROBE_TEXT else f"a program failed: {outcome.stderr.strip()}"
