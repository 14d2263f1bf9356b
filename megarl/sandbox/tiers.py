"""Which kinds of sandboxes a machine has, and the choice among them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from megarl.config.reward import SandboxConfig
from megarl.errors import ConfigError, SandboxError
from megarl.sandbox.fork_server_client import PROGRAMS, ForkServer
from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.launcher.bubblewrap import MIN_VERSION
from megarl.sandbox.sandbox import Case, Interpreter, Outcome, Program, Sandbox, read_outcome
from megarl.sandbox.service import GRACE_SECONDS, ServiceSandbox
from megarl.sandbox.session import Session

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
