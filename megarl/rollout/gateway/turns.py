"""The turns of a session as a tree, and the token sequences that it is trained on.

turn 0   prompt 0 | output 0
turn 1             '- given 1 | output 1            the first turn after another continues its sequence
turn 2             '- given 2 | output 2            a second one has a sequence of its own: prompt 0, output 0 and
                                                    given 2 are its prompt, of which nothing is trained on again

A long conversation is rendered by a few of its exchanges:

    exchange 0: question | reply    exchange 1: tool's result | reply    exchange 2: tool's result | reply    ...

What a chat template writes for new messages depends on the messages before by their kinds alone: which roles there
are, whether replies have thoughts and calls, and what marks of the template their texts have. New messages are
therefore rendered after exchanges in which each kind occurs, instead of after the whole conversation.

Clients send their full conversation with each request: a list that continues one that was read costs its new elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from megarl.batch.trajectory import Prompt, Routes, Trajectory, fit_routes
from megarl.engines.engine import Generation
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.reply_parser import ParsedReply

_SPACE = re.compile(r"[ \t\r\n]*")

MAX_BRANCHES = 16
"""Lists that are kept, the least recently used ones are dropped. A list that continues another one replaces it."""


class PrefixMemory[T, V]:
    """Computes a value for each element of a list from the value before; not again for a prefix that is known.

    Known prefixes are found by comparing elements, which for thousands of messages takes microseconds, where reading,
    hashing and rendering them takes milliseconds.
    """

    def __init__(self) -> None:
        self._branches: list[tuple[list[T], list[V]]] = []
        """Elements and their values, the most recently used list last."""

    def values(self, elements: Sequence[T], compute: Callable[[V | None, T], V]) -> list[V]:
        """Return the value of each element; `compute` gets the value before, None for the first, and the element.

        If it raises an exception, nothing is kept of this list.
        """
        lengths = [_common_length(known, elements) for known, _ in self._branches]
        length = max(lengths, default=0)
        found = lengths.index(length) if length else None
        known = ([], []) if found is None else self._branches[found]
        values = known[1][:length]
        for element in elements[length:]:
            values.append(compute(values[-1] if values else None, element))
        if found is not None and length in (len(known[0]), len(elements)):
            del self._branches[found]
        else:
            known = (known[0][:length], known[1][:length])
        known[0].extend(elements[length:])
        known[1].extend(values[length:])
        self._branches = [*self._branches, known][-MAX_BRANCHES:]
        return values


class JsonMemory:
    """Parses objects that have one long list each; not again the elements with which the text before began too.

    before  {"model": "m", "messages": [A, B], "stream": true}
    now     {"model": "m", "messages": [A, B, C, D], "stream": true}     parsed: {"model": "m", "messages": [C, D], ...
    """

    def __init__(self, name: str) -> None:
        """`name`: key of the list."""
        self._name, self._key = name, re.compile(rf'"{name}"\s*:\s*\[')
        self._head = self._known = ""
        """The last text up to the beginning of the list, and up to the end of its last element."""
        self.elements: list[Any] = []
        """The elements of the list of the last text."""

    def parse(self, text: str) -> Any:
        """Return the value of a JSON text.

        Raises:
            ValueError: it is no JSON, has half of a surrogate pair, numbers of thousands of digits or that are not
                finite, or is nested too deeply.
        """
        following = text[len(self._known) :].lstrip() if self._known and text.startswith(self._known) else ""
        if following[:1] in (",", "]"):
            head, elements, rest = self._head, self.elements, following.removeprefix(",")
        else:
            match = self._key.search(text)
            head, elements, rest = "" if match is None else text[: match.end()], [], text[match.end() if match else 0 :]
        found = from_json(head + rest, allow_inf_nan=False)
        added = found.get(self._name) if isinstance(found, dict) else None
        length = _elements_length(rest, added) if head and isinstance(added, list) else None
        if isinstance(added, list) and length is not None:
            self._head, self.elements = head, [*elements, *added]
            self._known = text[: len(text) - len(rest) + length]
            return {**found, self._name: self.elements}
        if elements:  # the key occurs twice
            self._known = ""
            return self.parse(text)
        return found


def _elements_length(text: str, elements: Sequence[object]) -> int | None:
    """Return the length of the elements with which a text begins; None: it does not begin with these."""
    decode, end = json.JSONDecoder().raw_decode, 0
    try:
        for number, expected in enumerate(elements):
            if number:
                end = text.index(",", end) + 1
            space = _SPACE.match(text, end)
            found, end = decode(text, space.end() if space else end)
            if found != expected:
                return None
    except ValueError:  # the elements are those of another list of this name
        return None
    return end


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many elements at the beginning are equal."""
    low, high = 0, min(len(first), len(second))
    middle = high
    while low < high:
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


Shape = tuple[object, ...]

_MARK = re.compile(r"<[^<>{}%'\"\\\s]+>|\[/?[A-Z_]+\]")
"""Marks in the source of a chat template, such as `</think>` or `[INST]`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """Messages that the policy was given, and its reply."""

    before: Exchange | None
    """The exchange before; None: this is the first one."""
    given: tuple[Message, ...]
    reply: Message
    """The reply with its thoughts and calls apart from its content."""
    text_reply: Message
    """The reply with its text as content."""
    shapes: tuple[Shape, ...]
    """Kinds of the messages, that of the reply last; runs of equal kinds are one."""
    depth: int
    """Number of exchanges up to this one."""
    summary: tuple[Exchange, ...] = ()
    """Exchanges that stand for all up to this one: each kind occurs, the last reply is of the kind of this one, and
    messages follow replies of the same kinds as in the conversation."""


class Exchanges:
    """Makes exchanges for conversations in one chat template."""

    def __init__(self, chat_template: str) -> None:
        self._marks = _find_marks(chat_template)

    def follow(
        self, before: Exchange | None, given: Sequence[Message], reply: Message, text_reply: Message | None = None
    ) -> Exchange:
        """Return the next exchange; `text_reply`: the reply with its text as content, by default as it is."""
        text_reply = text_reply or reply
        shapes = tuple(self._shapes([*given, {**reply, "content": f"{reply['content']}{text_reply['content']}"}]))
        known = () if before is None else before.summary
        exchange = Exchange(
            before=before,
            given=tuple(given),
            reply=reply,
            text_reply=text_reply,
            shapes=shapes,
            depth=1 if before is None else before.depth + 1,
        )
        exchange.summary = _summarize(known, exchange)
        return exchange

    def read(self, messages: tuple[Message, ...]) -> tuple[Exchange | None, tuple[Message, ...]]:
        """Return the exchanges of a conversation, as the last one, and the messages after it."""
        last: Exchange | None = None
        start = 0
        for end, message in enumerate(messages):
            if message["role"] == "assistant":
                last, start = self.follow(last, messages[start:end], message), end + 1
        return last, messages[start:]

    def _shapes(self, messages: Sequence[Message]) -> Iterator[Shape]:
        last = None
        for message in messages:
            content = message["content"]
            marks = frozenset(self._marks.findall(content))
            num_calls = min(2, len(message.get("tool_calls", ())))
            shape = (message["role"], bool(content.strip()), marks, num_calls, frozenset(message))
            if shape != last:
                yield shape
            last = shape


def whole(last: Exchange | None) -> list[Exchange]:
    """Return all exchanges up to the last one."""
    found = []
    while last is not None:
        found.append(last)
        last = last.before
    return found[::-1]


def flatten(exchanges: Sequence[Exchange], *, as_text: bool) -> list[Message]:
    """Return the messages of exchanges; `as_text`: replies have their text as content."""
    return [message for each in exchanges for message in (*each.given, each.text_reply if as_text else each.reply)]


def _summarize(known: tuple[Exchange, ...], exchange: Exchange) -> tuple[Exchange, ...]:
    """Return exchanges that stand for the known ones and another one, without detours that show nothing new.

    The known ones are cut after the last reply of the kind of the new one, if each kind still occurs.
    """
    for end in range(len(known), 0, -1):
        seen = {each.shapes for each in known[:end]}
        if known[end - 1].shapes[-1] == exchange.shapes[-1] and seen.issuperset(
            each.shapes for each in (*known[end:], exchange)
        ):
            return known[:end]
    return (*known, exchange)


@lru_cache
def _find_marks(chat_template: str) -> re.Pattern[str]:
    marks = sorted(set(_MARK.findall(chat_template)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


class TokenSequence:
    """Token ids that turns continue one after the other, in one list."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.last: Turn | None = None
        """The turn that continues it last."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One request of the policy and its answer."""

    number: int
    """Counts the turns of a session from 0, in the order of their requests."""
    parent: Turn | None
    """The turn whose tokens this one continues; None: its prompt begins a sequence."""
    given: NDArray[np.int32]
    """[K]: tokens between the parent's output and this one's; without a parent, the prompt."""
    sequence: TokenSequence
    """Begins with the prompt, and its output once it is sampled; a turn that continues this one may follow."""
    num_prompt_tokens: int
    """Number of tokens before the output."""
    history: Exchange | None
    """The conversation before `messages`; None: there is none."""
    messages: tuple[Message, ...]
    """The messages after the last reply before."""
    generation: Generation | None = None
    """The tokens sampled, log-probabilities and versions, as the engine returned them; None: not finished."""
    text: str = ""
    """Text of the tokens sampled, special tokens included, without the one that ends the turn."""
    reply: ParsedReply | None = None
    """The answer as the client sees it."""
    exchange: Exchange | None = None
    """The conversation with the reply; None: not finished."""
    stop: str | None = None
    """The stop text of the request that ended the reply; None: none did."""
    is_cut: bool = False
    """Whether the reply was ended by the episode's limit of tokens."""

    @property
    def num_routed(self) -> int:
        """Number of tokens of the prompt whose routes are known from the turns that it continues."""
        routed, parent = 0, self.parent
        while parent is not None:
            assert parent.generation is not None
            routed += 0 if parent.generation.routes is None else len(parent.generation.routes)
            parent = parent.parent
        return routed

    def own_routes(self, generation: Generation) -> Routes | None:
        """Return the routes of a generation for this turn, without those of sampled tokens that were left out."""
        end = self.num_prompt_tokens + len(generation.token_ids) - self.num_routed
        return None if generation.routes is None else generation.routes[:end]

    @property
    def routes(self) -> Routes | None:
        """Routes of the first tokens of its sequence, up to its output; None: of none."""
        parts: list[Routes] = []
        turn: Turn | None = self
        while turn is not None:
            assert turn.generation is not None
            parts += [] if turn.generation.routes is None else [turn.generation.routes]
            turn = turn.parent
        return np.concatenate(parts[::-1]) if parts else None

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens before the output."""
        return self.sequence.token_ids[: self.num_prompt_tokens]


def make_turn(
    number: int, parent: Turn | None, given: Sequence[int], history: Exchange | None, messages: tuple[Message, ...]
) -> Turn:
    """Return a turn that is not sampled yet; the tokens `given` follow the output of the parent."""
    if parent is None:
        sequence = TokenSequence(given)
    else:
        assert parent.generation is not None, f"turn {parent.number} is not finished"
        sequence = parent.sequence
        if sequence.last is not parent:  # another turn continues it
            sequence = TokenSequence(sequence.token_ids[: parent.num_prompt_tokens + len(parent.generation.token_ids)])
        sequence.token_ids += given
    turn = sequence.last = Turn(
        number=number,
        parent=parent,
        given=np.array(given, np.int32),
        sequence=sequence,
        num_prompt_tokens=len(sequence.token_ids),
        history=history,
        messages=messages,
    )
    return turn


def call_id(turn: Turn, index: int) -> str:
    """Return the id of a call, unique in its session; nine characters, which some chat templates require."""
    return f"c{turn.number:05d}{index:03d}"


def split_sequences(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the finished turns of each token sequence; each turn is in one, and the last turn in the last one.

    The first turn of a sequence has its whole prompt as given tokens, each further one those after its parent.
    """
    sequences: list[list[Turn]] = []
    ends: dict[int, list[Turn]] = {}
    for turn in sorted((t for t in turns if t.generation is not None), key=lambda t: t.number):
        sequence = None if turn.parent is None else ends.pop(turn.parent.number, None)
        if sequence is None:
            sequence = []
            sequences.append(sequence)
        sequence.append(turn)
        ends[turn.number] = sequence
    return sorted(sequences, key=lambda sequence: sequence[-1].number)


def make_trajectories(
    turns: Sequence[Turn], prompt: Prompt, group_id: int, *, finish_reason: str, reward: float | None = None
) -> list[Trajectory]:
    """Return a trajectory for each token sequence; without finished turns, one of the prompt alone.

    Args:
        reward: that of the harness, which belongs to the last turn; None: it returned none.
    """
    trajectories = []
    sequences = split_sequences(turns)
    for segment, sequence in enumerate(sequences):
        parts: list[tuple[NDArray[np.int32], Generation | None]] = []
        for position, turn in enumerate(sequence):
            given = turn.given if position else np.array(turn.prompt_ids, np.int32)
            assert turn.generation is not None
            parts += [(given, None), (turn.generation.token_ids, turn.generation)]
        is_last = segment == len(sequences) - 1
        rewards = (*[0.0] * (len(sequence) - 1), reward) if reward is not None and is_last else ()
        trajectories.append(
            replace(
                _trajectory(
                    parts, prompt, group_id, segment=segment, finish_reason=finish_reason, turn_rewards=rewards
                ),
                routes=fit_routes(sequence[-1].routes, sum(len(token_ids) for token_ids, _ in parts)),
            )
        )
    if not trajectories:
        given = np.array(prompt.token_ids, np.int32)
        return [_trajectory([(given, None)], prompt, group_id, segment=0, finish_reason=finish_reason)]
    return trajectories


def _trajectory(
    parts: Sequence[tuple[NDArray[np.int32], Generation | None]],
    prompt: Prompt,
    group_id: int,
    *,
    segment: int,
    finish_reason: str,
    turn_rewards: tuple[float, ...] = (),
) -> Trajectory:
    """Return the tokens one after the other; those with a generation are the sampled ones."""
    lengths = [len(token_ids) for token_ids, _ in parts]
    pairs = list(zip(lengths, (generation for _, generation in parts), strict=True))
    return Trajectory(
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        token_ids=np.concatenate([token_ids for token_ids, _ in parts]),
        loss_mask=np.repeat([generation is not None for _, generation in parts], lengths),
        logprobs=np.concatenate([np.zeros(n, np.float32) if g is None else g.logprobs for n, g in pairs]),
        policy_versions=np.concatenate(
            [np.full(n, -1, np.int32) if g is None else g.policy_versions for n, g in pairs]
        ),
        finish_reason=finish_reason,
        segment=segment,
        turn_rewards=turn_rewards,
    )
