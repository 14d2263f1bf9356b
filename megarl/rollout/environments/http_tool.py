"""Questions that are answered through an HTTP API: the policy writes requests, reads responses, and gives an answer."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

import httpx

from megarl.errors import AgentError
from megarl.rollout.environments.environment import Step, Task, require_answers
from megarl.rollout.environments.search import is_answer, normalize
from megarl.text import replace_surrogates

REQUEST = re.compile(r"^http (GET|POST) (\S+)(?: (.+))?$", re.MULTILINE)
"""A line of a reply with a request: method, URL or path, and body."""

METHODS = ("GET", "POST")

SHARED_KEY = "megarl.http"
"""Key of the connections in `Task.shared`."""

KEY = "rollout.env.kwargs"


class HttpTool:
    """Sends the first line `http GET URL` or `http POST URL BODY` of a reply, until a reply has none.

    That reply needs to end in `#### <answer>`; the reward is 1 if it equals that of the row (`data.fields.answer`)
    without case, punctuation and articles. The policy reads the status and the text of a response. A URL that is not
    allowed, and an API that takes too long, are told to the policy; an API that cannot be reached fails the episode.
    Redirects are not followed. Cookies are kept for the episode.

    Examples:
            rollout:
              env:
                path: megarl.rollout.environments:HttpTool
                kwargs: {allow: [https://api.example.org/v1], base_url: https://api.example.org/v1}
    """

    def __init__(
        self,
        *,
        allow: Sequence[str],
        base_url: str | None = None,
        methods: Sequence[str] = ("GET",),
        timeout_seconds: float = 5.0,
        max_bytes: int = 4096,
        api_key_env: str | None = None,
        role: str = "tool",
    ) -> None:
        """Check the settings.

        Args:
            allow: URLs that the policy may request, each with all that lies below it, such as `https://host/api`.
            base_url: URL that a request of a path such as `/weather` is appended to; None: requests need whole URLs.
            methods: HTTP methods that the policy may use.
            timeout_seconds: duration of a request, until the last byte of its response.
            max_bytes: largest number of bytes of a request's body, and of a response that is read.
            api_key_env: environment variable of the rollout workers, whose value is sent as `Authorization: Bearer
                VALUE`. The policy does not see it unless the API shows it.
            role: role of the messages with responses.

        Raises:
            AgentError: a setting is invalid, or the environment variable is not set.
        """
        if isinstance(allow, str) or not allow:
            raise AgentError(f"{KEY}.allow needs a list of URLs, got {allow!r}")
        self._allowed = [_read_allowed(url) for url in allow]
        if base_url is not None and not self._is_allowed(_read_allowed(base_url, "base_url")):
            raise AgentError(f"{KEY}.base_url needs to be in {KEY}.allow, got {base_url!r}")
        unknown = set(methods) - set(METHODS)
        if isinstance(methods, str) or unknown or not methods:
            raise AgentError(f"{KEY}.methods needs a list of {', '.join(METHODS)}, got {methods!r}")
        for name, value in (("timeout_seconds", timeout_seconds), ("max_bytes", max_bytes)):
            if value <= 0:
                raise AgentError(f"{KEY}.{name} needs to be above 0, got {value}")
        headers = {"Accept-Encoding": "identity"}
        if api_key_env is not None:
            if api_key_env not in os.environ:
                raise AgentError(f"{KEY}.api_key_env: the environment variable {api_key_env} is not set")
            headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        self._base_url, self._methods, self._headers, self._role = base_url, methods, headers, role
        self._timeout_seconds, self._max_bytes = timeout_seconds, max_bytes
        self._client: httpx.AsyncClient | None = None
        self._answers: list[str] = []

    async def reset(self, task: Task) -> None:
        """Begin with the messages of the row; connections are shared with the other episodes of the rollout worker.

        Raises:
            ValueError: the row has no answer.
        """
        self._answers = [normalize(answer) for answer in require_answers(task)]
        if SHARED_KEY not in task.shared:
            task.shared[SHARED_KEY] = httpx.AsyncHTTPTransport(trust_env=False)
        self._client = httpx.AsyncClient(
            transport=task.shared[SHARED_KEY],
            headers=self._headers,
            timeout=None,  # noqa: S113 -- `step` limits the whole request, httpx only its parts
            follow_redirects=False,
            trust_env=False,
        )

    async def step(self, reply: str) -> Step:
        """Return the response to a request, or the reward of an answer.

        Raises:
            httpx.TransportError: the API cannot be reached, or the connection was lost.
        """
        request = REQUEST.search(reply)
        if request is None:
            return Step(reward=float(is_answer(reply, self._answers)), done=True)
        text = await self._respond(request[1], request[2], replace_surrogates(request[3] or ""))
        return Step(messages=[{"role": self._role, "content": text}], num_calls=1)

    def close(self) -> None:
        """Do nothing: later episodes use the connections."""

    async def _respond(self, method: str, target: str, body: str) -> str:
        """Return what the policy reads of its request."""
        if method not in self._methods:
            return f"error: only {', '.join(self._methods)}"
        if len(body.encode()) > self._max_bytes:
            return f"error: a body has at most {self._max_bytes} bytes"
        try:
            url = httpx.URL(self._base_url.rstrip("/") + target if self._base_url and target[0] == "/" else target)
        except (httpx.InvalidURL, UnicodeEncodeError):
            return "error: no URL"
        if not self._is_allowed(url):
            return "error: this URL is not allowed"
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._send(method, url, body)
        except TimeoutError:
            return f"error: no response within {self._timeout_seconds:g} s"

    async def _send(self, method: str, url: httpx.URL, body: str) -> str:
        assert self._client is not None
        content = body.encode() if method == "POST" else None
        async with self._client.stream(method, url, content=content) as response:
            found = bytearray()
            async for chunk in response.aiter_raw():
                found += chunk
                if len(found) > self._max_bytes:
                    break
            text = bytes(found[: self._max_bytes]).decode(errors="replace")
            cut = f"\n(cut after {self._max_bytes} bytes)" if len(found) > self._max_bytes else ""
            return f"{response.status_code} {text.rstrip()}{cut}".rstrip()

    def _is_allowed(self, url: httpx.URL) -> bool:
        """Whether scheme, host and port are those of an allowed URL, whose path the URL has or lies below."""
        path = unquote(url.path)
        if url.userinfo or "\\" in path or ".." in path.split("/") or "%" in path:
            return False
        return any(
            (url.scheme, url.host, _port(url)) == (allowed.scheme, allowed.host, _port(allowed))
            and (path + "/").startswith(allowed.path.rstrip("/") + "/")
            for allowed in self._allowed
        )


def _read_allowed(text: str, name: str = "allow") -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as e:
        raise AgentError(f"{KEY}.{name} needs URLs, got {text!r}: {e}") from e
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment or url.userinfo:
        raise AgentError(f"{KEY}.{name} needs URLs such as https://host/path, got {text!r}")
    return url


def _port(url: httpx.URL) -> int:
    return url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
