"""Sandboxes of this machine: a new one for each program, and one for each interpreter."""

from __future__ import annotations

from functools import cache
from typing import Any

from megarl.errors import SandboxError
from megarl.sandbox.fork_server_client import ForkServer
from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.sandbox import Interpreter, Outcome, Program
from megarl.sandbox.session import Session

GRACE_SECONDS = 20.0
"""Time after a program's limit in which its sandbox reports, on a busy machine; then the sandbox counts as lost."""

SEND_SECONDS = 20.0


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

    def run(self, program: Program) -> list[Outcome]:
        """Return the outcomes of the program's cases; as `Sandbox.run`."""
        cases = [{"stdin": case.stdin} if case.call is None else {"call": case.call} for case in program.cases]
        request = {"kind": "cases", "source": program.source, "setup": program.setup, "cases": cases}
        session = self._server.start(self.tier, self._limits)
        outcomes: list[Outcome] = []
        try:
            session.send(request, seconds=SEND_SECONDS)
            while len(outcomes) < len(cases):
                reply = session.receive(seconds=self._limits.wall_seconds + GRACE_SECONDS)
                outcomes.append(_outcome(reply))
        except EOFError:  # the kernel has killed the runner together with a program that used too much
            _require_supervisor(session, self.tier)
            outcomes += [Outcome(status="killed")] * (len(cases) - len(outcomes))
        except TimeoutError as e:
            raise _lost(self.tier, "it did not answer in time") from e
        finally:
            session.close()
        return outcomes

    def open_interpreter(self) -> Interpreter:
        """Start an interpreter; as `Sandbox.open_interpreter`."""
        return LocalInterpreter(self._server.start(self.tier, self._limits), self.tier, self._limits)

    def close(self) -> None:
        """Do nothing: the shared fork server ends with this process."""


class LocalInterpreter:
    """An interpreter in a sandbox of this machine; see `Interpreter`."""

    def __init__(self, session: Session, tier: str, limits: Limits) -> None:
        self._session, self._tier, self._limits = session, tier, limits

    def run(self, source: str) -> Outcome:
        """Return the outcome of a cell; as `Interpreter.run`."""
        try:
            self._session.send({"kind": "cell", "source": source}, seconds=SEND_SECONDS)
            return _outcome(self._session.receive(seconds=self._limits.wall_seconds + GRACE_SECONDS))
        except EOFError:
            _require_supervisor(self._session, self._tier)
            return Outcome(status="killed")
        except TimeoutError as e:
            raise _lost(self._tier, "it did not answer in time") from e

    def close(self) -> None:
        """End the interpreter and all of its processes."""
        self._session.close()


def _outcome(reply: dict[str, Any]) -> Outcome:
    return Outcome(**{name: reply[name] for name in ("status", "stdout", "stderr", "value")})


def _require_supervisor(session: Session, tier: str) -> None:
    """Return if a sandbox has ended under supervision.

    Raises:
        SandboxError: its supervisor or the fork server has been killed.
    """
    if session.close() is None:
        raise _lost(tier, "its supervisor has ended")


def _lost(tier: str, reason: str) -> SandboxError:
    return SandboxError(f"a sandbox of tier {tier} was lost: {reason}")
