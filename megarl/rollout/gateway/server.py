"""The HTTP server of a rollout worker: `/v1/chat/completions`, `/v1/responses` and `/v1/models`.

A request belongs to the session whose key it has: as API key, or in its path, `/s/KEY/v1/...`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from megarl.errors import MegarlError
from megarl.rollout.gateway.chat_api import chat_chunks, chat_response, read_chat_request
from megarl.rollout.gateway.responses_api import read_responses_request, responses_events, responses_response
from megarl.rollout.gateway.session import Session
from megarl.rollout.gateway.turn_request import RefusedRequestError, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OVERRULED_HEADER = "x-overruled-options"
"""Header of responses: the client's options that did not apply."""

MAX_REQUEST_BYTES = 64 * 2**20


class GatewayServer:
    """Answers the requests of sessions on one port."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, host: str = "127.0.0.1") -> None:
        """`host`: address to listen at; the system chooses the port."""
        self._tokenizer, self._host = tokenizer, host
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._lock = asyncio.Lock()
        self._port = 0
        self._logged: set[tuple[str, ...]] = set()

    async def start(self) -> None:
        """Listen; no-op if the server does already."""
        async with self._lock:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_REQUEST_BYTES)
            for prefix in ("", "/s/{session}"):
                app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
                app.router.add_post(f"{prefix}/v1/responses", self._responses)
                app.router.add_get(f"{prefix}/v1/models", self._models)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, self._host, 0)
            await site.start()
            self._port = runner.addresses[0][1]
            self._runner = runner

    async def close(self) -> None:
        """Stop listening; no-op if the server does not listen."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @contextmanager
    def serve(self, session: Session) -> Iterator[tuple[str, str]]:
        """Answer requests of the session while the block runs; yields its base URL and API key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._sessions[key] = session
        try:
            yield f"http://{host}:{self._port}/s/{key}/v1", key
        finally:
            del self._sessions[key]

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        async def respond(body: dict[str, Any], session: Session) -> web.StreamResponse:
            request = read_chat_request(body)
            self._log_overruled(request)
            turn = await session.answer(request)
            tokenizer = self._tokenizer if body.get("logprobs") else None
            if not body.get("stream"):
                return _json_response(chat_response(turn, request, tokenizer=tokenizer), request)
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            chunks = chat_chunks(turn, request, usage=usage, tokenizer=tokenizer)
            events = [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]
            return await _stream(http, events, request)

        return await self._respond(http, respond)

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        async def respond(body: dict[str, Any], session: Session) -> web.StreamResponse:
            request = read_responses_request(body)
            self._log_overruled(request)
            turn = await session.answer(request)
            if not body.get("stream"):
                return _json_response(responses_response(turn, request, body), request)
            events = responses_events(turn, request, body)
            return await _stream(
                http, [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events], request
            )

        return await self._respond(http, respond)

    async def _models(self, http: web.Request) -> web.StreamResponse:
        if self._find_session(http) is None:
            return _unknown_session()
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}]}
        )

    async def _respond(self, http: web.Request, respond: Any) -> web.StreamResponse:
        """Return the response, or an error in the form of OpenAI's API."""
        session = self._find_session(http)
        if session is None:
            return _unknown_session()
        try:
            body = await http.json()
        except ValueError as e:
            return _error(400, f"the body needs to be JSON: {e}", "invalid_request")
        if session.is_closed:  # while the body arrived
            return _unknown_session()
        if not isinstance(body, dict):
            return _error(400, f"the body needs to be a JSON object, got {type(body).__name__}", "invalid_request")
        try:
            response: web.StreamResponse = await respond(body, session)
        except RefusedRequestError as e:
            session.last_refusal = str(e)
            return _error(400, str(e), e.code, e.param)
        except MegarlError as e:
            return _error(500, str(e), "server_error")
        except asyncio.CancelledError:
            if session.is_closed:
                return _unknown_session()
            raise
        return response

    def _find_session(self, http: web.Request) -> Session | None:
        key = http.match_info.get("session")
        if key is None:
            key = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return self._sessions.get(key)

    def _log_overruled(self, request: TurnRequest) -> None:
        """Log once for each set of options."""
        if request.overruled and request.overruled not in self._logged:
            self._logged.add(request.overruled)
            logger.warning(
                "the harness sets %s, which do not apply: sampling is that of the run", ", ".join(request.overruled)
            )


def _json_response(body: dict[str, Any], request: TurnRequest) -> web.Response:
    return web.json_response(body, headers=_headers(request))


def _headers(request: TurnRequest) -> dict[str, str]:
    return {OVERRULED_HEADER: ", ".join(request.overruled)} if request.overruled else {}


async def _stream(http: web.Request, events: Iterable[str], request: TurnRequest) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_headers(request)}
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(http)
        for event in events:
            await response.write(event.encode())
        await response.write_eof()
    except ConnectionError:  # the client is gone; it may send the request again
        pass
    return response


def _unknown_session() -> web.Response:
    return _error(401, "the API key, or the path /s/KEY/v1, needs the key of a running session", "invalid_api_key")


def _error(status: int, message: str, code: str, param: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code, "param": param}}, status=status)
