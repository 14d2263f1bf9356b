"""One episode as the gateway sees it: its turns, its limits, and which tokens a request continues."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.batch.trajectory import Trajectory
from megarl.config.harness import HarnessConfig
from megarl.errors import AgentError, MegarlError
from megarl.rollout.agents.episode import Episode
from megarl.rollout.engine import Generation
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.chat_messages import make_message
from megarl.rollout.gateway.reply_parser import ParsedReply, ReplyParser
from megarl.rollout.gateway.turn_request import RefusedRequestError, TurnRequest
from megarl.rollout.gateway.turns import Turn, call_id, make_trajectories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED = {
    "turns": "max_turns = {max_turns} replies were sampled",
    "seconds": "max_seconds = {max_seconds:g} are over",
    "calls": "max_calls = {max_calls} tool calls were made",
    "length": "no room is left for another reply within rollout.max_new_tokens",
}
"""By limit, in the order in which they are checked: why the episode has ended."""


class Session:
    """The turns of one episode. A request that was answered before gets the same answer.

    A turn continues the longest conversation that the session knows: the tokens before are its prompt and output as
    sampled, and the new messages alone are rendered. Without one, or where the chat template rewrites it, the turn
    begins another token sequence.
    """

    def __init__(
        self, episode: Episode, config: HarnessConfig, renderer: ChatRenderer, parser: ReplyParser, *, can_call: bool
    ) -> None:
        """`can_call`: whether the parser finds tool calls."""
        self._episode, self._config, self._renderer, self._parser = episode, config, renderer, parser
        self._can_call = can_call
        self._turns: list[Turn] = []
        self._answers: dict[bytes, asyncio.Future[Turn]] = {}
        """By `TurnRequest.key`, the turns so far, also those that are being sampled."""
        self._by_conversation: dict[bytes, Turn] = {}
        """By the hash of a conversation that ends with a reply, the turn that replied."""
        self._num_calls = 0
        self._began_at = episode.clock.time()
        self._specials = _pattern(episode.tokenizer)
        self._special_ids = frozenset(episode.tokenizer.all_special_ids)
        self.limit: str | None = None
        """The limit that has ended the episode; None: none so far."""
        self.limit_reached = asyncio.Event()
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with an error of an engine, with which the run ends."""
        self.is_closed = False
        self.last_refusal = ""
        """Message of the last request that was refused."""

    @property
    def num_turns(self) -> int:
        """Number of turns, including those that are being sampled."""
        return len(self._turns)

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
        key = request.key
        found = self._answers.get(key)
        if found is None:
            turn = self._begin(request)
            found = self._answers[key] = asyncio.ensure_future(self._sample(turn, request))
            found.add_done_callback(self._note_error)
        return await asyncio.shield(found)

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
        reason = self.limit or ("length" if is_cut else "stop")
        episode = self._episode
        return make_trajectories(finished, episode.prompt, episode.group_id, finish_reason=reason, reward=reward)

    def _begin(self, request: TurnRequest) -> Turn:
        """Return the turn of a new request, not sampled yet."""
        if (limit := self._find_limit()) is not None:
            self._refuse_after(limit)
        if request.tools and not self._can_call:
            raise RefusedRequestError("tools need rollout.harness.tool_parser, which is not set", param="tools")
        try:
            turn = self._continue(request)
        except AgentError as e:
            raise RefusedRequestError(str(e), param="messages") from e
        if self._room(turn.num_prompt_tokens) <= 0:
            self._refuse_after("length")
        self._turns.append(turn)
        return turn

    def _continue(self, request: TurnRequest) -> Turn:
        keys = request.prefix_keys
        structured = request.messages
        for length in range(len(request.messages), 0, -1):
            parent = self._by_conversation.get(keys[length])
            if parent is None:
                continue
            following = request.messages[length:]
            turn = self._extend(parent, following, request.tools)
            if turn is not None:
                return turn
            structured = (*parent.structured, _structured_reply(parent), *following)
            break
        if self._turns and self._config.forks == "forbid":
            raise RefusedRequestError(
                "the conversation does not continue an earlier one of the session token by token, which "
                "rollout.harness.forks: forbid does not allow",
                param="messages",
            )
        try:
            text = self._renderer.render(structured, request.tools)
        except AgentError:  # templates may refuse thoughts next to calls
            text = self._renderer.render(request.messages, request.tools)
        return self._turn(None, text, request.messages, structured)

    def _extend(self, parent: Turn, following: Sequence[Message], tools: Sequence[Message]) -> Turn | None:
        """Return a turn that continues a reply with new messages; None: the template rewrites what was before.

        Templates write a reply from its thoughts, content and calls. If that is not what was sampled, the text of the
        reply is its content.
        """
        assert parent.generation is not None
        reply = self._episode.decode(parent.generation.token_ids)
        messages = (*parent.messages, make_message("assistant", reply), *following)
        structured = (*parent.structured, _structured_reply(parent), *following)
        with suppress(AgentError):
            text = self._renderer.continuation(parent.all_text, structured, tools)
            if text is not None:
                return self._turn(parent, text, messages, structured)
        with suppress(AgentError):  # some templates need the calls before a tool's result, which the reply has as text
            found = self._renderer.extension(parent.messages, reply, following, None, None, tools)
            if not found.is_fork:
                return self._turn(parent, found.text, messages, structured)
        return None

    def _turn(
        self, parent: Turn | None, text: str, messages: tuple[Message, ...], structured: tuple[Message, ...]
    ) -> Turn:
        """Return a turn; `text`: what is rendered after the text of its parent."""
        last_token = None if parent is None or parent.generation is None else int(parent.generation.token_ids[-1])
        given = np.array(self._renderer.encode_after(last_token, text), np.int32)
        return Turn(
            number=len(self._turns),
            parent=parent,
            given=given,
            given_text=text,
            messages=messages,
            structured=structured,
        )

    async def _sample(self, turn: Turn, request: TurnRequest) -> Turn:
        prompt_ids = turn.prompt_ids.tolist()
        room = self._room(len(prompt_ids))
        limits = [room, self._config.max_turn_tokens, request.max_tokens]
        generation = await self._episode.complete(prompt_ids, max_new_tokens=min(n for n in limits if n is not None))
        if not len(generation.token_ids):
            raise AgentError(f"the engine sampled no token on {self._episode.prompt.prompt_id}")
        turn.is_cut = generation.finish_reason != "stop" and len(generation.token_ids) >= room
        generation, content_end = self._cut_at_stop(generation, request.stop)
        text = self._decode(generation)
        reply = await self._parse(text if content_end is None else content_end, request.tools)
        turn.generation, turn.reply, turn.text = generation, reply, text
        self._num_calls += len(reply.calls)
        said = make_message("assistant", reply.content, calls=[("", call.name, call.arguments) for call in reply.calls])
        self._by_conversation[request.key_after(said)] = turn
        return turn

    def _cut_at_stop(self, generation: Generation, stop: Sequence[str]) -> tuple[Generation, str | None]:
        """Leave out the tokens after the one that completes a stop text.

        Returns:
            The generation, and the text before the stop text; None: there is none.
        """
        if not stop:
            return generation, None
        token_ids = generation.token_ids
        text = self._episode.decode(token_ids)
        positions = [(text.index(each), each) for each in stop if each in text]
        if not positions:
            return generation, None
        start, found = min(positions)
        low, high = 1, len(token_ids)  # the smallest number of tokens whose text has the stop text
        while low < high:
            middle = (low + high) // 2
            if found in self._episode.decode(token_ids[:middle]):
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
        return cut, text[:start]

    async def _parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        """Return the parts of a reply. Parsers read special tokens, of which clients see none."""
        parsed = await self._parser.parse(text, tools)
        return replace(parsed, content=self._specials.sub("", parsed.content))

    def _decode(self, generation: Generation) -> str:
        """Return the text of a reply with its special tokens, without the one that ends it."""
        tokenizer, token_ids = self._episode.tokenizer, generation.token_ids
        kept = token_ids[:-1] if int(token_ids[-1]) in self._special_ids else token_ids
        text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _room(self, num_tokens: int) -> int:
        """Return how many tokens may follow so many, within the limits of a sequence and of all sampled tokens."""
        episode = self._episode
        sampled = sum(len(turn.generation.token_ids) for turn in self._turns if turn.generation is not None)
        most = episode.max_num_tokens - len(episode.prompt.token_ids)
        return min(episode.max_num_tokens - num_tokens, most - sampled)

    def _find_limit(self) -> str | None:
        """Return the first limit that is reached."""
        config = self._config
        if self.limit is not None:
            return self.limit
        if len(self._turns) >= config.max_turns:
            return "turns"
        if self._episode.clock.time() - self._began_at >= config.max_seconds:
            return "seconds"
        if config.max_calls is not None and self._num_calls >= config.max_calls:
            return "calls"
        return None

    def _refuse_after(self, limit: str) -> None:
        self.end(limit)
        why = ENDED[limit].format(**self._config.model_dump())
        code = "context_length_exceeded" if limit == "length" else limit
        raise RefusedRequestError(f"the episode has ended: {why}", code=code)

    def _note_error(self, answer: asyncio.Future[Turn]) -> None:
        if answer.cancelled() or (error := answer.exception()) is None:
            return
        if not self.error.done():
            self.error.set_exception(
                error if isinstance(error, MegarlError) else AgentError(f"a turn failed: {error!r}")
            )


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
