"""One episode as the gateway sees it: its turns, its limits, and which tokens a request continues."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import TIME_LIMIT, Trajectory
from megarl.config.rollout import HarnessConfig
from megarl.data.chat_template import chat_template_source
from megarl.engines.engine import Generation
from megarl.engines.engine_pool import EngineFailedError
from megarl.errors import AgentError, MegarlError
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.reply_parser import ParsedReply, ReplyParser
from megarl.rollout.gateway.turn_request import RefusedRequestError, TurnRequest, make_message, message_digest
from megarl.rollout.gateway.turns import (
    Exchange,
    Exchanges,
    JsonMemory,
    PrefixMemory,
    Turn,
    call_id,
    flatten,
    make_trajectories,
    make_turn,
    whole,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHECKED_EXCHANGES = 8
"""Conversations of so many exchanges are rendered as a whole too, to check that a few of them can stand for all."""

ENDED = {
    "turns": "max_turns = {max_turns} replies were sampled",
    TIME_LIMIT: "max_seconds = {max_seconds:g} are over",
    "calls": "max_calls = {max_calls} tool calls were made",
    "length": "all tokens of rollout.max_new_tokens were sampled",
}
"""By limit, in the order in which they are checked: why the episode has ended."""

TOO_LONG = "context_length_exceeded"
"""Code of the refusal of a request that leaves no room for a reply, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """A stop text that a reply has."""

    text: str
    before: str
    """Text of the reply before it, special tokens included."""


class Session:
    """The turns of one episode. A request that was answered before gets the same answer.

    A turn continues the longest conversation that the session knows: the tokens before are its prompt and output as
    sampled, and the new messages alone are rendered, after a few exchanges that stand for those before. Without one,
    or where the chat template rewrites it, the turn begins another token sequence.

    Parallel turns share the tokens that the episode may sample: each reserves what it may take, and a turn for which
    nothing is left waits for those before it.
    """

    def __init__(
        self, episode: Episode, config: HarnessConfig, renderer: ChatRenderer, parser: ReplyParser, *, can_call: bool
    ) -> None:
        """`can_call`: whether the parser finds tool calls."""
        self._episode, self._config, self._renderer, self._parser = episode, config, renderer, parser
        self._can_call = can_call
        self._turns: list[Turn] = []
        self._num_turns = 0
        """Number of turns so far, with those that were refused while they waited."""
        self._answers: dict[bytes, asyncio.Future[Turn]] = {}
        """By conversation and limits of the request, the turns so far, also those that are being sampled."""
        self._by_conversation: dict[bytes, Turn] = {}
        """By the hash of a conversation that ends with a reply, the turn that replied."""
        self.read_before: defaultdict[str, PrefixMemory[Any, Any]] = defaultdict(PrefixMemory)
        """By API, what its requests had as messages, as parsed JSON, and what was read from them."""
        self.bodies = {"messages": JsonMemory("messages"), "input": JsonMemory("input")}
        """By the list of messages that they have, the bodies of requests."""
        self._keys: PrefixMemory[object, bytes] = PrefixMemory()
        """Tools and messages of requests, each with the hash of all up to it."""
        self._exchanges = Exchanges(chat_template_source(episode.tokenizer))
        self._summaries_hold = True
        """Whether the exchanges that stand for a conversation have been rendered as the whole one so far."""
        self._num_sampled = self._num_reserved = 0
        """Number of tokens that were sampled, and that the turns in flight may take."""
        self._admission = asyncio.Lock()
        """Held by the first one of the turns that wait for tokens."""
        self._released = asyncio.Event()
        """Set when a turn has returned the tokens that it has not taken."""
        self._is_too_long = False
        """Whether the last request was refused because it leaves no room for a reply."""
        self._num_calls = 0
        self._began_at = episode.clock.time()
        self._specials = _pattern(episode.tokenizer)
        self._special_ids = frozenset(episode.tokenizer.all_special_ids)
        self.limit: str | None = None
        """The limit that has ended the episode; None: none so far."""
        self.limit_reached = asyncio.Event()
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with an error of an engine, with which the episode ends."""
        self.is_closed = False
        self.last_refusal = ""
        """Message of the last request that was refused."""
        episode.limit_reached.add_done_callback(lambda _: self.end(TIME_LIMIT))

    @property
    def num_turns(self) -> int:
        """Number of turns, including those that are being sampled."""
        return len(self._turns)

    @property
    def ending(self) -> str | None:
        """The limit with which the episode ends if its program ends now; None: none.

        A program that ends after a request without room for a reply has ended by the length. It may continue with a
        shorter one instead.
        """
        return self.limit or ("length" if self._is_too_long else None)

    @property
    def in_flight(self) -> list[asyncio.Future[Turn]]:
        """The turns that are being sampled."""
        return [answer for answer in self._answers.values() if not answer.done()]

    async def answer(self, request: TurnRequest) -> Turn:
        """Return the turn that answers a request: a new one, or that of the same request before.

        It is sampled to its end also if the caller is cancelled, as long as the session is not closed.

        Raises:
            RefusedRequestError: a limit has ended the episode, or the conversation cannot be rendered.
            MegarlError: as `Episode.generate`.
        """
        assert not self.is_closed, "a closed session has no further turns"
        if request.messages and request.messages[-1]["role"] == "assistant":
            raise RefusedRequestError(
                "messages end with one of the assistant, which the policy would answer with a second one: the gateway "
                "does not continue messages, send those up to the last one of another role",
                param="messages",
            )
        given = [request.tools, request.template_kwargs] if request.template_kwargs else request.tools
        keys = self._keys.values([given, *request.messages], _extend_key)
        limits = json.dumps([request.max_tokens, request.stop]).encode()
        key = hashlib.sha256(keys[-1] + limits).digest()
        found = self._answers.get(key)
        if found is not None:
            self._is_too_long = False
        else:
            turn = self._begin(request, keys)
            found = self._answers[key] = asyncio.ensure_future(self._sample(turn, request, keys[-1]))
            found.add_done_callback(self._note_error)
        return await asyncio.shield(found)

    def count_prompt_tokens(self, request: TurnRequest) -> int:
        """Return how many tokens the conversation has as a whole.

        Raises:
            RefusedRequestError: it cannot be rendered.
        """
        try:
            return len(self._renderer_of(request).prompt(request.messages, request.tools))
        except AgentError as e:
            raise RefusedRequestError(str(e), param="messages") from e

    def _renderer_of(self, request: TurnRequest) -> ChatRenderer:
        return self._renderer.with_variables(request.template_kwargs)

    def end(self, limit: str) -> None:
        """End the episode by a limit: further turns are refused. The first limit counts."""
        if self.limit is None:
            self.limit = limit
            self.limit_reached.set()

    async def close(self) -> None:
        """Cancel the turns that are being sampled, and abort their requests; they are not trained on."""
        self.is_closed = True
        unfinished = self.in_flight
        for answer in unfinished:
            answer.cancel()
        await self._episode.abort_unfinished()
        await asyncio.gather(*unfinished, return_exceptions=True)
        if self.error.done() and not self.error.cancelled():
            self.error.exception()  # marks it as retrieved

    def trajectories(self, reward: float | None) -> list[Trajectory]:
        """Return the token sequences of the finished turns; `reward`: that of the harness, if it returned one."""
        finished = [turn for turn in self._turns if turn.generation is not None]
        is_cut = bool(finished) and finished[-1].is_cut
        reason = self.ending or ("length" if is_cut else "stop")
        episode = self._episode
        return make_trajectories(finished, episode.prompt, episode.group_id, finish_reason=reason, reward=reward)

    def _begin(self, request: TurnRequest, keys: Sequence[bytes]) -> Turn:
        """Return the turn of a new request, not sampled yet; `keys`: hashes of its tools and messages."""
        if (limit := self._find_limit()) is not None:
            self._refuse_after(limit)
        if request.tools and not self._can_call:
            raise RefusedRequestError("tools need rollout.harness.tool_parser, which is not set", param="tools")
        try:
            turn = self._continue(request, keys)
        except AgentError as e:
            raise RefusedRequestError(str(e), param="messages") from e
        most = self._episode.max_num_tokens
        if turn.num_prompt_tokens >= most:
            self._is_too_long = True
            raise RefusedRequestError(
                f"the request has {turn.num_prompt_tokens} tokens, which leaves no room for a reply within the {most} "
                "tokens of the row's prompt and rollout.max_new_tokens",
                code=TOO_LONG,
                param="messages",
            )
        if self._num_free() <= 0 and not self._num_reserved:
            self._refuse_after("length")
        self._is_too_long = False
        self._num_turns += 1
        self._turns.append(turn)
        return turn

    def _continue(self, request: TurnRequest, keys: Sequence[bytes]) -> Turn:
        renderer = self._renderer_of(request)
        for length in range(len(request.messages), 0, -1):
            parent = self._by_conversation.get(keys[length])
            if parent is None:
                continue
            following = request.messages[length:]
            text = self._extend(parent, following, request)
            if text is not None:
                assert parent.generation is not None
                given = renderer.encode_after(int(parent.generation.token_ids[-1]), text)
                return make_turn(self._num_turns, parent, given, parent.exchange, following)
            history, messages = parent.exchange, following
            break
        else:
            history, messages = self._exchanges.read(request.messages)
        if self._turns and self._config.forks == "forbid":
            raise RefusedRequestError(
                "the conversation does not continue an earlier one of the session token by token, which "
                "rollout.harness.forks: forbid does not allow",
                param="messages",
            )
        try:
            text = renderer.render([*flatten(whole(history), as_text=False), *messages], request.tools)
        except AgentError:  # templates may refuse thoughts next to calls
            text = renderer.render(request.messages, request.tools)
        given = renderer.encode(text)
        return make_turn(self._num_turns, None, given, history, messages)

    def _extend(self, parent: Turn, following: Sequence[Message], request: TurnRequest) -> str | None:
        """Return the text that follows a reply and its new messages; None: the template rewrites what was before.

        The first exchanges of a conversation are all rendered. If a few of them, which stand for all, lead to the same
        text, these alone are rendered from then on.
        """
        before = parent.history
        if before is None:
            return self._text_after((), parent, following, request)
        if not self._summaries_hold:
            return self._text_after(whole(before), parent, following, request)
        text = self._text_after(before.summary, parent, following, request)
        if before.depth <= CHECKED_EXCHANGES and len(before.summary) < before.depth:
            expected = self._text_after(whole(before), parent, following, request)
            self._summaries_hold = text == expected
            return expected
        return text

    def _text_after(
        self, before: Sequence[Exchange], parent: Turn, following: Sequence[Message], request: TurnRequest
    ) -> str | None:
        """Return the text of new messages after a reply; `before`: the exchanges before that of the reply.

        Templates write a reply from its thoughts, content and calls. If that is not what was sampled, the text of the
        reply is its content.
        """
        assert parent.exchange is not None
        renderer, tools = self._renderer_of(request), request.tools
        with suppress(AgentError):
            messages = [*flatten(before, as_text=False), *parent.messages]
            prompt = renderer.render(messages, tools) + parent.text
            text = renderer.render([*messages, parent.exchange.reply, *following], tools)
            if text.startswith(prompt):
                return text[len(prompt) :]
        with suppress(AgentError):  # some templates need the calls before a tool's result, which the reply has as text
            messages = [*flatten(before, as_text=True), *parent.messages]
            reply = parent.exchange.text_reply["content"]
            found = renderer.extension(messages, reply, following, None, None, tools)
            if not found.is_fork:
                return found.text
        return None

    async def _sample(self, turn: Turn, request: TurnRequest, key: bytes) -> Turn:
        limit, room = await self._reserve(turn, request)
        try:
            generation = await self._episode.complete(
                turn.prompt_ids, max_new_tokens=limit, are_known=True, num_routed=turn.num_routed
            )
            if not len(generation.token_ids):
                if generation.finish_reason == TIME_LIMIT:
                    self._turns.remove(turn)
                    self._refuse_after(TIME_LIMIT)
                raise EngineFailedError("the engine sampled no token")
            is_cut = generation.finish_reason != "stop" and len(generation.token_ids) >= room
            generation, text, stop = self._cut_at_stop(generation, request.stop)
            generation = replace(generation, routes=turn.own_routes(generation))
            reply = await self._parse(text if stop is None else stop.before, request.tools)
            self._num_sampled += len(generation.token_ids)
        finally:
            self._num_reserved -= limit
            self._released.set()
        turn.is_cut, turn.generation, turn.reply, turn.text = is_cut, generation, reply, text
        turn.stop = None if stop is None else stop.text
        turn.sequence.token_ids += generation.token_ids.tolist()
        as_text = make_message("assistant", self._episode.decode(generation.token_ids))
        turn.exchange = self._exchanges.follow(turn.history, turn.messages, _structured_reply(turn), as_text)
        self._num_calls += len(reply.calls)
        said = make_message("assistant", reply.content, calls=[("", call.name, call.arguments) for call in reply.calls])
        self._by_conversation[_extend_key(key, said)] = turn
        return turn

    async def _reserve(self, turn: Turn, request: TurnRequest) -> tuple[int, int]:
        """Wait until there are tokens for a turn, and reserve those that it may sample, which its caller releases.

        Returns:
            The number of tokens reserved, and how many the limits of the episode allow.
        """
        async with self._admission:
            while (room := self._room(turn)) <= 0:
                if not self._num_reserved:
                    self._turns.remove(turn)
                    self._refuse_after("length")
                _warn_of_waiting()
                self._released.clear()
                await self._released.wait()
            limits = [room, self._config.max_turn_tokens, request.max_tokens]
            limit = min(n for n in limits if n is not None)
            self._num_reserved += limit
        return limit, room

    def _cut_at_stop(self, generation: Generation, stop: Sequence[str]) -> tuple[Generation, str, _Stop | None]:
        """Leave out the tokens after the one that completes a stop text.

        Returns:
            The generation, its text with special tokens, and the stop text; None: there is none.
        """
        token_ids, text = generation.token_ids, self._decode(generation.token_ids)
        visible = self._specials.sub("", text)  # in which clients look for their stop texts
        positions = [(visible.index(each), each) for each in stop if each in visible]
        if not positions:
            return generation, text, None
        start, found = min(positions)
        low, high = 1, len(token_ids)  # the smallest number of tokens whose text has the stop text
        while low < high:
            middle = (low + high) // 2
            if found in self._specials.sub("", self._decode(token_ids[:middle])):
                high = middle
            else:
                low = middle + 1
        cut = replace(
            generation,
            token_ids=token_ids[:low],
            logprobs=generation.logprobs[:low],
            policy_versions=generation.policy_versions[:low],
            finish_reason="stop",
        )
        for special in self._specials.finditer(text):
            if special.start() > start:
                break
            start += len(special[0])
        return cut, self._decode(cut.token_ids), _Stop(text=found, before=text[:start])

    async def _parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        """Return the parts of a reply. Parsers read special tokens, of which clients see none."""
        parsed = await self._parser.parse(text, tools)
        return replace(parsed, content=self._specials.sub("", parsed.content))

    def _decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a reply with its special tokens, without the one that ends it."""
        kept = token_ids[:-1] if int(token_ids[-1]) in self._special_ids else token_ids
        text = self._episode.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _num_free(self) -> int:
        """Return how many tokens no turn has sampled or may sample."""
        episode = self._episode
        return episode.max_num_tokens - len(episode.prompt.token_ids) - self._num_sampled - self._num_reserved

    def _room(self, turn: Turn) -> int:
        """Return how many tokens may follow a prompt, within the limits of a sequence and of all sampled tokens."""
        return min(self._episode.max_num_tokens - turn.num_prompt_tokens, self._num_free())

    def _find_limit(self) -> str | None:
        """Return the first limit that is reached."""
        config = self._config
        if self.limit is not None:
            return self.limit
        if len(self._turns) >= config.max_turns:
            return "turns"
        if self._episode.clock.time() - self._began_at >= config.max_seconds:
            return TIME_LIMIT
        if config.max_calls is not None and self._num_calls >= config.max_calls:
            return "calls"
        return None

    def _refuse_after(self, limit: str) -> None:
        self.end(limit)
        why = ENDED[limit].format(**self._config.model_dump())
        if limit == TIME_LIMIT and self._episode.limit_reached.done():
            why = "rollout.request_timeout_seconds are over"
        code = TOO_LONG if limit == "length" else limit
        raise RefusedRequestError(f"the episode has ended: {why}", code=code)

    def _note_error(self, answer: asyncio.Future[Turn]) -> None:
        if answer.cancelled() or (error := answer.exception()) is None or isinstance(error, RefusedRequestError):
            return
        if not self.error.done():
            self.error.set_exception(
                error if isinstance(error, MegarlError) else AgentError(f"a turn failed: {error!r}")
            )


@cache
def _warn_of_waiting() -> None:
    """Log once that turns wait."""
    logger.warning(
        "a turn waits until another one of its episode is sampled, which may take all tokens that are left of "
        "rollout.max_new_tokens; rollout.harness.max_turn_tokens lets turns run in parallel"
    )


def _extend_key(key: bytes | None, element: Any) -> bytes:
    """Return the hash of a request's tools and variables, which have no key before, or of all up to a message."""
    if key is None:
        return hashlib.sha256(json.dumps(element, sort_keys=True).encode()).digest()
    return hashlib.sha256(key + message_digest(element)).digest()


def _structured_reply(turn: Turn) -> Message:
    """Return the reply of a turn as chat templates take it, with the thoughts under both names that they use."""
    assert turn.reply is not None
    calls = [(call_id(turn, index), call.name, call.arguments) for index, call in enumerate(turn.reply.calls)]
    message = make_message("assistant", turn.reply.content, calls=calls)
    thoughts = turn.reply.reasoning
    return {**message, "reasoning_content": thoughts, "thinking": thoughts} if thoughts else message


def _pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    names = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
