"""The choice of a sandbox by configuration and machine, and the client of a sandbox service.

The service is one of this process, which uses a sandbox of this machine.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarl.config.reward import SandboxConfig
from megarl.errors import ConfigError, SandboxError
from megarl.sandbox import service as service_module
from megarl.sandbox import tiers
from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.sandbox import Case, Interpreter, Outcome, Program
from megarl.sandbox.service import ServiceSandbox
from megarl.sandbox.tiers import LocalSandbox
from tests.errors import expect_error
from tests.sandbox.local_tiers import patient_limits


class Service(ThreadingHTTPServer):
    interpreters: dict[str, Interpreter]
    broken: tuple[int, bytes] | None = None


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        interpreters = self.server.interpreters
        if self.server.broken is not None:
            self.answer(*self.server.broken)
        elif self.path == "/run":
            cases = [Case(**case) for case in body["cases"]]
            program = Program(source=body["source"], setup=body["setup"], cases=cases, seconds=body["seconds"])
            outcomes = LocalSandbox("unsafe", Limits(**body["limits"])).run(program)
            self.answer(200, json.dumps({"outcomes": [asdict(outcome) for outcome in outcomes]}).encode())
        elif self.path == "/interpreters":
            interpreters[f"a/{len(interpreters)}"] = LocalSandbox("unsafe", Limits(**body["limits"])).open_interpreter()
            self.answer(200, json.dumps({"id": [*interpreters][-1]}).encode())
        else:
            self.answer(200, json.dumps(asdict(interpreters[self.number()].run(body["source"]))).encode())

    def do_DELETE(self) -> None:
        self.server.interpreters.pop(self.number()).close()
        self.answer(200, b"{}")

    def number(self) -> str:
        return self.path.removeprefix("/interpreters/").replace("%2F", "/")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), Handler)
    server.interpreters = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_runs_programs_and_interpreters(service):
    sandbox = ServiceSandbox(f"http://127.0.0.1:{service.server_port}/", patient_limits())
    program = Program(source="def f(x): return x + 1", cases=[Case(call="f(1)"), Case(stdin="")])
    assert sandbox.run(program) == [Outcome(status="ok", value="2"), Outcome(status="ok")]
    interpreter = sandbox.open_interpreter()
    assert interpreter.run("x = 3").status == "ok"
    assert interpreter.run("x").stdout == "3\n"
    interpreter.close()
    assert service.interpreters == {}
    sandbox.close()


def test_a_program_may_be_any_text(service):
    sandbox = ServiceSandbox(f"http://127.0.0.1:{service.server_port}", patient_limits())
    outcome, second = sandbox.run(Program(source="x = '\ud800\x00'", cases=[Case(stdin="\udfff"), Case(call="f(1)")]))
    assert (outcome.status, second.status) == ("error", "error")
    interpreter = sandbox.open_interpreter()
    assert interpreter.run("'\ud800'").status in ("ok", "error")
    interpreter.close()


def test_cases_of_a_service_share_a_time_limit_and_end_with_the_last_that_is_wanted(service):
    sandbox = ServiceSandbox(f"http://127.0.0.1:{service.server_port}", patient_limits())
    cases = [Case(stdin=text) for text in ("go", "wait", "go")]
    source = "import time\nif input() == 'wait': time.sleep(6000)"
    found = sandbox.run(Program(source=source, cases=cases, seconds=3.0))
    assert [outcome.status for outcome in found][1:] == ["timeout"] * 2
    program = Program(source="print(input(), end='')", cases=[Case(stdin=text) for text in "abc"])
    found = sandbox.run(program, until=lambda index, outcome: outcome.stdout == "b")
    assert [outcome.stdout for outcome in found] == ["a", "b"]


def test_a_service_that_answers_without_end_is_a_failure(monkeypatch):
    """Each byte arrives in time, the answer never."""
    monkeypatch.setattr(service_module, "GRACE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.01)

        threading.Thread(target=answer, daemon=True).start()
        sandbox = ServiceSandbox(f"http://127.0.0.1:{server.getsockname()[1]}", patient_limits())
        with pytest.raises(SandboxError, match=r"interpreters takes longer than 0.5 s|failed: ReadTimeout"):
            sandbox.open_interpreter()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ((500, b"{}"), "returned status 500, needs 200"),
        ((302, b"{}"), "returned status 302, needs 200"),
        ((200, b"no"), "needs to return JSON, got 'no'"),
        ((200, b"[]"), "needs to return an object"),
        ((200, b'{"outcomes": []}'), "needs to return 1 outcomes"),
        ((200, b'{"outcomes": [{"status": "passed"}]}'), "needs to return outcomes with a status"),
    ],
)
def test_a_failing_service_is_no_result_of_the_program(service, monkeypatch, broken, message):
    monkeypatch.setattr(service, "broken", broken)
    sandbox = ServiceSandbox(f"http://127.0.0.1:{service.server_port}", patient_limits())
    with pytest.raises(SandboxError, match=message):
        sandbox.run(Program(source="", cases=[Case()]))


def test_a_service_that_is_not_there():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port
        sandbox = ServiceSandbox(f"http://127.0.0.1:{silent.getsockname()[1]}", patient_limits())
        with expect_error(SandboxError, "interpreters", "failed"):
            sandbox.open_interpreter()


NONE = {"bubblewrap": "not installed", "launcher": "forbidden", "runsc": "too old"}
KEY = "reward.terms.tests.sandbox"


@pytest.fixture
def no_tiers(monkeypatch):
    monkeypatch.setattr(tiers, "find_tier_problem", NONE.get)


def test_refuses_a_machine_without_sandboxes(no_tiers):
    with pytest.raises(ConfigError, match=rf"{KEY} .*bubblewrap: not installed; launcher: forbidden; runsc: too old"):
        tiers.choose_tier(SandboxConfig(), key=KEY)
    with expect_error(ConfigError, "none"):
        tiers.choose_tier(SandboxConfig(tier="launcher"), key=KEY)
    assert tiers.choose_tier(SandboxConfig(allow_unsafe=True), key=KEY) == "unsafe"


def test_prefers_a_sandbox_that_works(monkeypatch):
    monkeypatch.setattr(tiers, "find_tier_problem", {"bubblewrap": "not installed", "launcher": None}.get)
    assert tiers.choose_tier(SandboxConfig(allow_unsafe=True), key=KEY) == "launcher"
    found = tiers.open_sandbox(SandboxConfig(), key=KEY)
    assert (type(found), found.tier) == (LocalSandbox, "launcher")


def test_a_service_needs_no_machine(no_tiers):
    assert isinstance(tiers.open_sandbox(SandboxConfig(tier="service", url="http://box"), key=KEY), ServiceSandbox)
    with expect_error(ValueError, "service", "needs"):
        SandboxConfig(tier="service")
    with expect_error(ValueError, "service", "needs"):
        SandboxConfig(url="http://box")
