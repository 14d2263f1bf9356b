"""Sandboxes behind HTTP, such as containers on other machines.

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
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx

from megarl.errors import SandboxError
from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.sandbox import Interpreter, Outcome, Program, read_outcome

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
