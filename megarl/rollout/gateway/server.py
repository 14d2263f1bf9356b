"""The HTTP server of a rollout worker: `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and `/v1/models`.

A request belongs to the session whose key it has: as API key, or in its path, `/s/KEY/v1/...`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megarl.errors import MegarlError
from megarl.rollout.gateway.chat_api import chat_chunks, chat_response, read_chat_request
from megarl.rollout.gateway.messages_api import (
    messages_error,
    messages_events,
    messages_response,
    read_messages_request,
)
from megarl.rollout.gateway.responses_api import read_responses_request, responses_events, responses_response
from megarl.rollout.gateway.session import Session
from megarl.rollout.gateway.turn_request import RefusedRequestError, TurnRequest
from megarl.rollout.gateway.turns import PrefixMemory, Turn
from megarl.text import describe_error, escape_controls, replace_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OVERRULED_HEADER = "x-overruled-options"
"""Header of responses: the client's options that did not apply."""

MAX_HEADER_CHARACTERS = 2000
"""Longest list of options in the header; the response has all of them."""

MAX_REQUEST_BYTES = 64 * 2**20

READ_TIMEOUT_SECONDS = 120.0
"""Timeout for the arrival of a request's body."""

Body = dict[str, Any]
Reader = Callable[[Body, PrefixMemory[Any, Any]], TurnRequest]

POLICY = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}


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
            app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_answer_errors])
            for prefix in ("", "/s/{session}"):
                app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
                app.router.add_post(f"{prefix}/v1/responses", self._responses)
                app.router.add_post(f"{prefix}/v1/messages", self._messages)
                app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
                app.router.add_get(f"{prefix}/v1/models", self._models)
                app.router.add_get(f"{prefix}/v1/models/{{name}}", self._model)
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
        request, _, turn = await self._answer(http, "chat", read_chat_request)
        tokenizer = self._tokenizer if request.has_logprobs else None
        if not request.is_streamed:
            return _json_response(chat_response(turn, request, tokenizer=tokenizer), request)
        chunks = chat_chunks(turn, request, usage=request.has_usage, tokenizer=tokenizer)
        events = [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]
        return await _stream(http, events, request)

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        request, body, turn = await self._answer(http, "responses", read_responses_request)
        if not request.is_streamed:
            return _json_response(responses_response(turn, request, body), request)
        return await _stream(http, map(_named_event, responses_events(turn, request, body)), request)

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        request, _, turn = await self._answer(http, "messages", read_messages_request)
        if not request.is_streamed:
            return _json_response(messages_response(turn, request), request)
        return await _stream(http, map(_named_event, messages_events(turn, request)), request)

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        session = self._find_session(http)
        request = read_messages_request(await self._read_body(http, session), session.read_before["messages"])
        return web.json_response({"input_tokens": session.count_prompt_tokens(request)})

    async def _models(self, http: web.Request) -> web.StreamResponse:
        self._find_session(http)
        return web.json_response({"object": "list", "data": [POLICY]})

    async def _model(self, http: web.Request) -> web.StreamResponse:
        """Any name is that of the policy."""
        self._find_session(http)
        return web.json_response({**POLICY, "id": http.match_info["name"]})

    async def _answer(self, http: web.Request, api: str, read: Reader) -> tuple[TurnRequest, Body, Turn]:
        """Return a request, its body, and the turn that answers it."""
        session = self._find_session(http)
        try:
            body = await self._read_body(http, session)
            request = read(body, session.read_before[api])
            self._log_overruled(request)
            return request, body, await session.answer(request)
        except RefusedRequestError as e:
            session.last_refusal = str(e)
            raise
        except asyncio.CancelledError:
            if session.is_closed:
                raise _unknown_session() from None
            raise

    async def _read_body(self, http: web.Request, session: Session) -> Body:
        """Return the JSON object that a request sends."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                raw = await http.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {READ_TIMEOUT_SECONDS:g} s") from None
        if session.is_closed:  # while the body arrived
            raise _unknown_session()
        messages = session.bodies["input" if http.path.endswith("/responses") else "messages"]
        try:
            body = messages.parse(raw.decode(http.charset or "utf-8"))
        except (LookupError, ValueError) as e:  # an unknown charset, surrogates, nesting, digits
            raise RefusedRequestError(f"the body needs to be JSON: {e}") from e
        if not isinstance(body, dict):
            raise RefusedRequestError(f"the body needs to be a JSON object, got {type(body).__name__}")
        return body

    def _find_session(self, http: web.Request) -> Session:
        key = http.match_info.get("session") or http.headers.get("x-api-key")
        if key is None:
            scheme, _, key = http.headers.get("Authorization", "").partition(" ")
            key = key if scheme.lower() == "bearer" else ""
        session = self._sessions.get(key.strip())
        if session is None:
            raise _unknown_session()
        return session

    def _log_overruled(self, request: TurnRequest) -> None:
        """Log once for each set of options."""
        if request.overruled and request.overruled not in self._logged:
            self._logged.add(request.overruled)
            logger.warning(
                "the harness sets %s, which do not apply: sampling is that of the run",
                escape_controls(", ".join(request.overruled)),
            )


def _json_response(body: dict[str, Any], request: TurnRequest) -> web.Response:
    return web.json_response(body, headers=_headers(request))


def _headers(request: TurnRequest) -> dict[str, str]:
    if not request.overruled:
        return {}
    names = ascii(", ".join(request.overruled))[1:-1]
    return {OVERRULED_HEADER: names[:MAX_HEADER_CHARACTERS]}


def _named_event(event: Body) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


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


def _unknown_session() -> web.HTTPException:
    return web.HTTPUnauthorized(reason="the API key, or the path /s/KEY/v1, needs the key of a running session")


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a request that fails with an error in the form of its API; the run continues.

    What `Session.error` has, such as an error of an engine, ends the episode.
    """
    try:
        return await handler(request)
    except RefusedRequestError as e:
        return _error(request, 400, str(e), e.code, e.param)
    except web.HTTPException as e:
        if e.status < 400:
            raise
        code = "invalid_api_key" if e.status == 401 else e.__class__.__name__.removeprefix("HTTP")
        response = _error(request, e.status, e.reason, code)
        response.headers.update({name: e.headers[name] for name in ("Allow",) if name in e.headers})
        return response
    except (web.RequestPayloadError, HttpProcessingError) as e:  # such as a wrong Content-Encoding
        return _error(request, 400, f"the body cannot be read: {e}", "invalid_request")
    except MegarlError as e:
        return _error(request, 500, str(e), "server_error")
    except Exception as e:  # noqa: BLE001 -- a fault of this package; logged without what UTF-8 cannot encode
        trace = replace_surrogates("".join(traceback.format_exception(e)))
        logger.error("the gateway failed on request %s\n%s", escape_controls(request.path), trace)  # noqa: TRY400
        return _error(request, 500, f"the gateway failed: {describe_error(e)}", "server_error")


def _error(http: web.Request, status: int, message: str, code: str, param: str | None = None) -> web.Response:
    """Return an error in the form of OpenAI's API, or of Anthropic's for its paths."""
    if "/v1/messages" in http.path:
        return web.json_response(messages_error(status, message, code), status=status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code, "param": param}}, status=status)
