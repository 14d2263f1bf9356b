"""The environment with an HTTP API, against a server on loopback."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from megarl.errors import AgentError
from megarl.rollout.environments.http_tool import HttpTool
from tests.errors import expect_error
from tests.rollout.environments.scripted import make_task
from tests.time_limits import UNREACHED_SECONDS

RESPONSES = {
    "/api/big": (200, b"y" * 1_000_000),
    "/api/bytes": (200, b"\xff\x00a\xf0"),
    "/api/missing": (404, b"no such town"),
}


class Handler(BaseHTTPRequestHandler):
    """Answers the paths that the tests request, and keeps what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        with contextlib.suppress(OSError):  # the client has left, or has read enough
            if self.path == "/api/slow":
                server.ended.wait()
            elif self.path == "/api/drip":
                self.respond(200, length=10**6)
                while not server.ended.wait(0.01):
                    self.wfile.write(b"x")
            elif self.path == "/api/garbage":
                self.wfile.write(b"no protocol\xff\r\n\r\n")
            elif self.path == "/api/away":
                self.respond(302, Location="/private")
            elif self.path == "/api/count":
                count = str(int((self.headers.get("Cookie") or "n=0").rpartition("=")[2]) + 1)
                self.respond(200, count.encode(), **{"Set-Cookie": f"n={count}"})
            elif self.command == "POST":
                self.respond(200, self.rfile.read(int(self.headers["Content-Length"])) + b"!")
            else:
                self.respond(*RESPONSES.get(self.path, (200, b"Tiku")))
        self.close_connection = self.path in ("/api/slow", "/api/drip", "/api/garbage")

    def respond(self, status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length or len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.ended = [], threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.ended.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


LIMITS = {"timeout_seconds": UNREACHED_SECONDS, "max_bytes": 100}


def talk(server: Any, *replies: str, episodes: int = 1, **kwargs: Any) -> list[str | float]:
    """Return the text after each reply of each episode, and the reward at its end."""
    url = f"http://127.0.0.1:{server.server_address[1]}/api"

    async def main() -> list[str | float]:
        found: list[str | float] = []
        shared: dict[str, Any] = {}
        for _ in range(episodes):
            env = HttpTool(**{"allow": [url], "base_url": url, **LIMITS, **kwargs})
            await env.reset(make_task("Tiku", shared=shared))
            for reply in replies:
                step = await env.step(reply.replace("URL", url))
                found.append(step.reward if step.done else str(step.messages[0]["content"]))
                assert step.done or step.num_calls == 1
            env.close()
        await shared["megarl.http"].aclose()
        return found

    return asyncio.run(main())


def test_responses_and_answers(server: Any) -> None:
    replies = ["I ask.\nhttp GET /mayor", "http GET URL/mayor?of=Lund", "http GET /missing", "It is #### tiku."]
    assert talk(server, *replies) == ["200 Tiku", "200 Tiku", "404 no such town", 1.0]
    assert talk(server, "#### Tika") == [0.0]
    assert [path for _, path, _ in server.asked] == ["/api/mayor", "/api/mayor?of=Lund", "/api/missing"]


def test_limits_of_time_and_bytes_are_told(server: Any) -> None:
    late = talk(server, "http GET /slow", "http GET /drip", timeout_seconds=0.2, max_bytes=100_000)
    assert late == ["error: no response within 0.2 s"] * 2
    assert talk(server, "http GET /big") == [f"200 {'y' * 100}\n(cut after 100 bytes)"]
    assert talk(server, f"http POST /a {'z' * 101}", methods=["POST"]) == ["error: a body has at most 100 bytes"]


def test_methods_are_those_of_the_settings(server: Any) -> None:
    assert talk(server, "http POST /a b", "http GET /a") == ["error: only GET", "200 Tiku"]
    assert talk(server, 'http POST /a {"b": 1}', methods=["GET", "POST"]) == ['200 {"b": 1}!']


OTHER_URLS = """
http://127.0.0.1:1/api/a http://localhost/api/a https://127.0.0.1/api/a http:///api private :: file:///etc/passwd
URLx URL/../private URL/%2e%2e/private URL/%252e%252e/private URL/..%2fprivate URL/a/..\\private URL@example.com/api/a
http://127.0.0.1:80@example.com/api /../private //example.com/api http://[::1 http://127.0.0.1:99999/api/a
http://127.0.0.1:a/api/a http://\x01/api http://\u2488com/api URL/\ud800 URL\u200b/a
"""


@pytest.mark.parametrize("target", [*OTHER_URLS.split(), "9" * 100_000])
def test_other_urls_are_not_requested(server: Any, target: str) -> None:
    (text,) = talk(server, f"http GET {target}")
    if target == "//example.com/api":  # a path below the base URL
        assert text == "200 Tiku"
        return
    assert text in {"error: this URL is not allowed", "error: no URL"}
    assert server.asked == []


def test_bytes_of_a_response_become_text(server: Any) -> None:
    assert talk(server, "http GET /bytes", "http GET /mayor") == ["200 \ufffd\x00a\ufffd", "200 Tiku"]


def test_a_response_that_is_no_http_fails_the_episode(server: Any) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        talk(server, "http GET /garbage")


@pytest.mark.parametrize("reply", ["", "http GET", "http DELETE /a", "HTTP GET /a", " http GET /a", "\x00\ud800"])
def test_replies_without_a_request_end_the_episode(server: Any, reply: str) -> None:
    assert talk(server, reply) == [0.0]
    assert server.asked == []


def test_redirects_are_not_followed(server: Any) -> None:
    assert talk(server, "http GET /away") == ["302"]
    assert [path for _, path, _ in server.asked] == ["/api/away"]


def test_cookies_are_kept_for_the_episode_alone(server: Any) -> None:
    assert talk(server, "http GET /count", "http GET /count", episodes=2) == ["200 1", "200 2", "200 1", "200 2"]


def test_the_key_is_sent(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    talk(server, "http GET /a", api_key_env="API_KEY")
    assert server.asked == [("GET", "/api/a", "Bearer secret")]


def test_proxies_of_the_environment_are_not_used(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert talk(server, "http GET /a") == ["200 Tiku"]


def test_an_api_that_cannot_be_reached_fails_the_episode() -> None:
    async def main() -> None:
        env = HttpTool(allow=["http://127.0.0.1:1"], **LIMITS)
        await env.reset(make_task("Tiku"))
        with pytest.raises(httpx.ConnectError):
            await env.step("http GET http://127.0.0.1:1/a")

    asyncio.run(main())
    with expect_error(ValueError, "p:1", "answer"):
        asyncio.run(HttpTool(allow=["http://a"]).reset(make_task(None)))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"allow": []}, "allow needs a list of URLs, got []"),
        ({"allow": "http://a"}, "allow needs a list of URLs, got 'http://a'"),
        ({"allow": ["a"]}, "allow needs URLs such as https://host/path, got 'a'"),
        ({"allow": ["http://a?b=1"]}, "allow needs URLs such as https://host/path, got 'http://a?b=1'"),
        ({"allow": ["http://a:b"]}, "allow needs URLs, got 'http://a:b'"),
        ({"base_url": "http://b"}, "base_url needs to be in rollout.env.kwargs.allow, got 'http://b'"),
        ({"methods": ["DELETE"]}, "methods needs a list of GET, POST, got ['DELETE']"),
        ({"timeout_seconds": 0}, "timeout_seconds needs to be above 0, got 0"),
        ({"max_bytes": -1}, "max_bytes needs to be above 0, got -1"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env: the environment variable NO_SUCH_KEY is not set"),
    ],
)
def test_settings_are_checked(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentError) as error:
        HttpTool(**{"allow": ["http://a"], **kwargs})
    assert f"rollout.env.kwargs.{message}" in str(error.value)
