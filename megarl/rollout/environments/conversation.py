"""The tokens that a chat template adds to a conversation, without rebuilding those that were sampled.

    prompt k | output k (sampled ids) | end of the turn, messages, head of the next turn = prompt k + 1

Where the template writes the conversation so far differently from what was sampled, such as without its thoughts, the
next prompt is no extension, and begins another segment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from megarl.config.data import DataConfig
from megarl.config.rollout import EnvironmentConfig, HarnessConfig
from megarl.data.chat_template import ChatTemplateError, apply_chat_template, has_chat_template, template_options
from megarl.data.conversations import join_text
from megarl.data.tokenizer import describe_unknown_token, read_vocab_size
from megarl.errors import AgentError, DataError
from megarl.rollout.agents.episode import RefusedTextError
from megarl.rollout.environments.environment import ENV, Message
from megarl.text import describe_error, map_text, replace_surrogates, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from megarl.engines.request_clock import RequestClock
from megarl.errors import MegarlError
from megarl.user_code import outcome_of


class EnvironmentFailedError(MegarlError):
    """An environment raised an exception or took too long: its episode counts for nothing."""


async def call_environment(
    function: Callable[..., Any], *arguments: object, label: str, seconds: float, clock: RequestClock
) -> Any:
    """Return what the function returns, awaited if it is async; a blocking function runs in a thread of its own.

    Args:
        label: names the call in errors, `rollout.env.path (module:Name).step`.
        seconds: time limit; pauses of the clock do not count. A thread that exceeds it is abandoned: it cannot be
            ended, and does not keep the process alive.

    Raises:
        EnvironmentFailedError: the function raised an exception or exceeded the limit.
    """
    run = _await if inspect.iscoroutinefunction(function) else _run_in_thread
    task = asyncio.ensure_future(run(function, *arguments))
    try:
        async with clock.timeout(max(0.0, seconds)):
            await asyncio.wait([task])
    except TimeoutError as e:
        raise EnvironmentFailedError(f"{label} did not return within {seconds:.3g} s (rollout.env.max_seconds)") from e
    finally:
        if not task.done():
            task.cancel()
            await asyncio.sleep(0)  # lets it clean up; one that ignores its cancellation is not waited for
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        raise EnvironmentFailedError(f"{label} raised {describe_error(error)}") from error
    return task.result()


async def _await(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what the async function returns. Its `exit()` is a failure of the call, and does not end the process."""
    try:
        return await function(*arguments)
    except (SystemExit, KeyboardInterrupt) as e:
        raise RuntimeError(describe_error(e)) from e


async def _run_in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what the function returns, run in a thread of its own: calls that never return would fill a pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if future.done():  # the caller has stopped waiting
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = outcome_of(partial(function, *arguments))
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(describe_error(error))  # the future raises it, where SystemExit would end the process
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await future


PLACEHOLDER = "\ue000reply\ue001"
"""Stands for a reply, of which the tokens after it do not depend."""

ESCAPE = "\ue0ff"
"""Stands, with a code point after it, for a special token which a message has as plain text, or for itself."""

PRIVATE_USE = 0xE100
"""First of the code points that follow ESCAPE."""

PROBES = ("yes", "<think>\nlet me see\n</think>\n\nyes")
"""Replies with which a template is probed: a plain one, and one with a thought."""

MAX_VARIANTS = 16
"""Renderers with other variables that are kept."""

MARK = "probe8d1f"
"""Text that a template is probed for."""

PROBED_QUESTION: Message = {"role": "user", "content": "is it?"}
PROBED_FUNCTION = {"name": "look", "description": MARK, "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True, slots=True)
class Extension:
    """What follows a reply in the token sequence."""

    text: str
    """As rendered: without forks, the text after the reply, and after a fork the whole prompt."""
    token_ids: list[int]
    """The tokens of the text; without the one that ends the reply, if it was sampled."""
    is_fork: bool


class ChatRenderer:
    """Renders conversations by a tokenizer's chat template, to tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, day: date, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Find the special tokens, which messages may have as plain text.

        Args:
            tokenizer: needs a chat template.
            day: what the template takes for the current date.
            options: as `template_options` returns them.
        """
        self._tokenizer, self._day, self._options = tokenizer, day, dict(options)
        self._variants: dict[str, ChatRenderer] = {}
        """By variables of the template as JSON, the renderers with them."""
        self._vocab_size = read_vocab_size(tokenizer)
        specials = sorted({str(token) for token in tokenizer.all_special_tokens} | _added_specials(tokenizer), key=len)
        self._specials = specials[::-1]
        self._escaped = [*self._specials, ESCAPE]
        self._escaped_pattern = re.compile("|".join(map(re.escape, self._escaped)))
        codes = "".join(chr(PRIVATE_USE + i) for i in range(len(self._escaped)))
        self._code_pattern = re.compile(f"{ESCAPE}([{codes}])")

    def with_variables(self, variables: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer with further variables of the template, which replace those of the same name."""
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True)
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = ChatRenderer(self._tokenizer, self._day, {**self._options, **variables})
        return self._variants[key]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the tokens of a conversation that the policy continues.

        Args:
            tools: definitions of tools, as chat templates take them.

        Raises:
            RefusedTextError: the template refuses the text of a message, or it has a token that the model lacks.
            AgentError: the template refuses the messages.
        """
        try:
            text = self.render(messages, tools)
        except AgentError as error:
            self._refuse(error, messages, tools)
        return self.encode(text)

    def _refuse(self, error: AgentError, messages: Sequence[Message], tools: Sequence[Message]) -> NoReturn:
        """Raise a RefusedTextError if the texts of the messages caused the error, else the error of other texts."""
        self.render([*map(_with_plain_text, messages)], tools)
        raise RefusedTextError(str(error)) from error

    def continuation(self, before: str, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str | None:
        """Return the rendered text of a conversation after `before`; None: it does not begin with it.

        Args:
            before: rendered text of a prompt, and that of its output without the token that ends the turn.

        Raises:
            AgentError: the template refuses the messages.
        """
        text = self.render(messages, tools)
        return text[len(before) :] if text.startswith(before) else None

    def encode_after(self, last_token: int | None, text: str) -> list[int]:
        """Return the tokens of a rendered text after a reply; if it begins with `last_token`, that is not repeated.

        Args:
            last_token: the last sampled token, None: not known.
        """
        end = None if last_token is None else self._tokenizer.convert_ids_to_tokens(last_token)
        return self.encode(text.removeprefix(end) if isinstance(end, str) and end in self._specials else text)

    def extension(
        self,
        messages: Sequence[Message],
        reply: str,
        following: Sequence[Message],
        last_token: int | None,
        shown: Message | None,
        tools: Sequence[Message] = (),
    ) -> Extension:
        """Return the tokens after a sampled reply, up to the policy's next turn.

        Args:
            messages: the conversation that was replied to.
            reply: text of the reply.
            following: messages after the reply.
            last_token: the last sampled token, if known; if the template ends a turn with it, it is not repeated.
            shown: how the conversation shows the reply; None: as its text.
            tools: definitions of tools, as chat templates take them.

        Raises:
            RefusedTextError: the template refuses the text of a message, which the policy may have caused, or it has a
                token that the model lacks.
            AgentError: the template refuses the messages.
        """
        said = {"role": "assistant", "content": reply}
        try:
            before = self.render(messages, tools)
            with_reply = self.render([*messages, shown or said, *following], tools)
        except AgentError as error:
            self._refuse(error, [*messages, shown or said, *following], tools)
        stand_in = self.render([*messages, {"role": "assistant", "content": PLACEHOLDER}, *following], tools)
        head = before + PLACEHOLDER
        tail = stand_in.removeprefix(head)
        if not stand_in.startswith(head) or not _is_extension(with_reply, before, self._escape(reply), tail):
            return Extension(with_reply, self.encode(with_reply), is_fork=True)
        return Extension(tail, self.encode_after(last_token, tail), is_fork=False)

    def rewrites_plain_texts(self, messages: Sequence[Message], following: Sequence[Message]) -> bool:
        """Return whether the template would rewrite earlier messages of this conversation also with other texts.

        Args:
            messages: the conversation that was replied to.
            following: messages after the reply.
        """
        plain = [*map(_with_plain_text, messages)]
        before = self.render(plain)
        stand_in = self.render([*plain, {"role": "assistant", "content": PLACEHOLDER}, *following])
        return not stand_in.startswith(before + PLACEHOLDER)

    def find_rewriting(self, *, role: str = "user") -> str | None:
        """Return what a probe of the template finds: how it rewrites earlier turns; None: it only appends."""
        start = [{"role": "user", "content": "is it?"}]
        for reply, what in zip(PROBES, ("earlier replies", "the thoughts of earlier replies"), strict=True):
            try:
                found = self.extension(start, reply, [{"role": role, "content": "why?"}], None, None)
            except AgentError as e:
                return str(e)
            if found.is_fork:
                return f"rewrites {what}"
        return None

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes definitions of tools."""
        tool = {"type": "function", "function": PROBED_FUNCTION}
        return self._is_marked([PROBED_QUESTION], tools=[tool])

    def omits(self, role: str) -> bool:
        """Return whether the template leaves out the text of messages of a role without an error."""
        return role in self._omitted_roles

    @cached_property
    def _omitted_roles(self) -> frozenset[str]:
        """Roles of messages whose text the template leaves out without an error."""
        call = {"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": {}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": MARK}
        probes: dict[str, list[Message]] = {
            "system": [{"role": "system", "content": MARK}, PROBED_QUESTION],
            "user": [{"role": "user", "content": MARK}],
            "tool": [PROBED_QUESTION, asked, result],
        }
        return frozenset(role for role, messages in probes.items() if not self._is_marked(messages))

    @cached_property
    def _needs_text_arguments(self) -> bool:
        """Whether the template takes the arguments of a call as JSON text alone, and fails on an object."""
        function = {"name": "look", "arguments": {"at": 1}}
        call = {"id": "c00000000", "type": "function", "function": function}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            apply_chat_template(self._tokenizer, [PROBED_QUESTION, asked], self._day, **self._options)
        except ChatTemplateError as error:
            return isinstance(error.__cause__, TypeError)
        return False

    def _arguments(self, arguments: object) -> object:
        is_text = isinstance(arguments, str) or not self._needs_text_arguments
        return arguments if is_text else json.dumps(arguments, ensure_ascii=False)

    def _is_marked(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> bool:
        """Return whether the template writes `MARK`, or refuses the messages, which is reported when they are sent."""
        try:
            return MARK in self._apply(messages, tools)
        except AgentError:
            return True

    def _with_arguments(self, message: Message) -> Message:
        """Return the message with the arguments of its calls, if it has any, in the form that the template takes."""
        if not message.get("tool_calls"):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return what the template writes; an `AgentError` names the roles of the messages that it refuses."""
        try:
            given: dict[str, Any] = {"tools": [map_text(tool, self._escape) for tool in tools]} if tools else {}
            options = {**self._options, **given}
            escaped = [map_text(self._with_arguments(message), self._escape) for message in messages]
            return replace_surrogates(apply_chat_template(self._tokenizer, escaped, self._day, **options))
        except (ChatTemplateError, LookupError, TypeError, RecursionError) as e:
            roles = ", ".join(text_of(message.get("role"), str) for message in messages)
            reason = e if isinstance(e, ChatTemplateError) else describe_error(e)  # calls of another form, or too deep
            raise AgentError(f"the tokenizer's chat template refuses messages of the roles {roles}: {reason}") from e

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return the text of a conversation and the head of the policy's turn.

        It has code points for special tokens that messages and tools have as plain text.

        Raises:
            AgentError: the template refuses the messages, or leaves one out.
        """
        omitted = self._omitted_roles.intersection(str(message.get("role")) for message in messages)
        if omitted:
            roles = ", ".join(sorted(omitted))
            raise AgentError(f"the tokenizer's chat template leaves out the text of messages of the roles {roles}")
        return self._apply(messages, tools)

    def _escape(self, text: str) -> str:
        def code(match: re.Match[str]) -> str:
            return ESCAPE + chr(PRIVATE_USE + self._escaped.index(match.group()))

        return self._escaped_pattern.sub(code, replace_surrogates(text))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text; special tokens are those that the template wrote.

        Raises:
            RefusedTextError: the model does not have one of the tokens.
        """
        token_ids: list[int] = []
        for number, part in enumerate(self._code_pattern.split(text)):
            is_code = number % 2 == 1
            plain = self._escaped[ord(part) - PRIVATE_USE] if is_code else part
            token_ids += self._tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=is_code)
        unknown = describe_unknown_token(self._tokenizer, token_ids, self._vocab_size)
        if unknown is not None:
            raise RefusedTextError(f"a text of the conversation cannot be used: {unknown}")
        return token_ids


def require_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    day: date,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    forks: str,
    refuses_forks: str | None,
    key: str = ENV,
) -> None:
    """Return if the chat template can be used for environments and harnesses.

    Args:
        day: as for `ChatRenderer`, like `options`.
        forks: what to do if the template rewrites earlier turns, `forbid` or `allow`.
        refuses_forks: why the algorithm cannot train on forked segments; None: it can.
        key: YAML key of the environment's section.

    Raises:
        DataError: the tokenizer has none, one that leaves out text, such as a template for lists of text and images, or
            one that rewrites earlier turns although segments must not be forked.
    """
    name = tokenizer.name_or_path or "this model"
    if not has_chat_template(tokenizer, options.get("chat_template")):
        raise DataError(f"{key} needs a tokenizer with a chat template, that of {name} has none")
    renderer = ChatRenderer(tokenizer, day, options)
    if renderer.omits("user"):
        raise DataError(f"{key} needs a chat template for messages of text, that of {name} leaves it out")
    if forks == "allow" and refuses_forks is None:
        return
    if forks == "allow":
        raise DataError(f"{key}.forks needs to be forbid, got allow: {refuses_forks}")
    found = renderer.find_rewriting()
    if found is not None:
        raise DataError(
            f"{key}.forks: forbid needs a chat template that only appends to a conversation, that of {name} "
            f"{found}; allow makes each rewritten conversation another segment of its episode"
        )


def make_renderers(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    section: EnvironmentConfig | HarnessConfig,
    *,
    refuses_forks: str | None,
    key: str = ENV,
) -> dict[str, ChatRenderer]:
    """Return a renderer by name of each source whose episodes are those of an environment or harness.

    Args:
        section: of the environment or harness, at the YAML key `key`.
        refuses_forks: why the algorithm cannot train on forked segments; None: it can.

    Raises:
        DataError: as `require_chat_template`, or a source has another template than the tokenizer.
    """
    renderers: dict[str, ChatRenderer] = {}
    for source in data.resolved_sources:
        own = f"{source.key}.env"
        if (key == own) if source.config.env is not None else not key.startswith("data."):
            has_chat_template(tokenizer, source.config.chat_template_name, key=source.key)
            options = template_options(source.config, tokenizer)
            require_chat_template(
                tokenizer, source.day, options, forks=section.forks, refuses_forks=refuses_forks, key=key
            )
            renderers[source.name] = ChatRenderer(tokenizer, source.day, options)
    return renderers


def _is_extension(text: str, before: str, reply: str, tail: str) -> bool:
    """Whether the text is prompt, reply and tail; templates may strip white space around the reply."""
    if not text.startswith(before) or not text.endswith(tail) or len(text) < len(before) + len(tail):
        return False
    return text[len(before) : len(text) - len(tail)].strip() == reply.strip()


def _with_plain_text(message: Message) -> Message:
    """Return the message with another text, if its content is a text."""
    return {**message, "content": PROBES[0]} if isinstance(message.get("content"), str) else message


def _added_specials(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def with_text(message: Message) -> Message:
    """Return the message with parts of text joined, null as an empty text; the assistant's may lack content."""
    has_content = "content" in message or message["role"] == "assistant"
    text = join_text(message.get("content")) if has_content else None
    return message if text is None else {**message, "content": text}


def bounded(message: Message, max_bytes: int) -> Message:
    """Return the message with its text without surrogates and cut to so many bytes of UTF-8, at a character."""
    message = with_text(message)
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": replace_surrogates(content).encode()[:max_bytes].decode(errors="ignore")}
