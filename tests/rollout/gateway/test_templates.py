"""Conversations with the chat templates of published models, which TRL's wheel carries.

A reply is what the template itself writes for it, as a trained policy samples it. What continues and what forks is
predicted by rendering the whole message lists directly and comparing their texts.
"""

import asyncio
import contextlib
import copy
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from megarl.batch.trajectory import Prompt
from megarl.config.rollout import HarnessConfig
from megarl.data.tiny_checkpoint import train_tokenizer
from megarl.engines.engine import Generation, GenerationRequest, Sampling
from megarl.errors import AgentError
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway import session
from megarl.rollout.gateway.chat_api import chat_response, read_chat_request
from megarl.rollout.gateway.reply_parser import ParsedReply, ToolCall
from megarl.rollout.gateway.session import Session
from megarl.rollout.gateway.turn_request import RefusedRequestError
from tests.rollout.environments.chat_templates import DAY, chat_tokenizer
from tests.rollout.gateway.scripted import make_prompt, sampled_ids
from tests.rollout.whole_batches import WholeBatches, make_generation

FOLDER = Path(sys.prefix) / "templates" / "trl" / "chat_templates"
"""`make test` installs the wheel there; the templates of other names than `*_training` are as published."""

DOCS = Path(__file__).parents[3] / "docs" / "gateway.md"

NUM_TURNS = 6

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer", "description": "Where."}}},
    },
}

TEXT_ARGUMENTS = ("deepseekv3",)
"""Templates that add up texts and the arguments of a call."""

REFUSAL = r"chat template (refuses messages|leaves out the text)"

SPECIAL = re.compile(r"<[|｜][^<>{}'\" \\]+>|<[^<>{}'\" \\|｜]+[|｜]>|<(?:start|end)_of_\w+>")
"""Names of special tokens in templates."""

NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))


@dataclass
class ScriptedPolicy(WholeBatches):
    """Engine and parser of one session: samples the reply that is set, and knows its parts."""

    token_ids: list[int] = field(default_factory=list)
    parts: ParsedReply = field(default_factory=lambda: ParsedReply(""))
    log: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = make_generation(self.token_ids)
        self.log.append((request, generation))
        return generation

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        return self.parts

    async def close(self) -> None:
        pass


@dataclass
class Prediction:
    """What direct rendering says of a conversation, whose replies have their parts, or their text as content."""

    tokenizer: Any
    tools: list[Message]
    structured: list[Message]
    plain: list[Message]
    is_structured: bool = True
    """Whether the sequence so far is the rendering of `structured`."""

    def render(self, messages: Sequence[Message], *, for_reply: bool = True) -> str:
        options = {"tools": self.tools} if self.tools else {}
        options |= {"tokenize": False, "add_generation_prompt": for_reply}
        return str(self.tokenizer.apply_chat_template(list(messages), **options))

    def refuses(self) -> bool:
        """Whether the template fails, or does not write the last message."""
        try:
            return self.structured[-1]["content"] not in self.render(self.structured)
        except (TemplateError, TypeError):
            return True

    def reply_text(self, reply: Message, fallback: str) -> str:
        """Return what the template writes for a reply; if that is not after the prompt, the fallback."""
        prompt, answered = self.render(self.structured), self.render([*self.structured, reply], for_reply=False)
        if answered.startswith(prompt):
            return answered.removeprefix(prompt).rstrip("\n")
        return fallback.removeprefix("<think>\n") if prompt.endswith("<think>\n") else fallback

    def continues(self, reply: Message, sampled: str, following: Message) -> bool:
        """Add a reply and the next message; return whether the next prompt begins with the last one and the reply."""
        said = {"role": "assistant", "content": SPECIAL.sub("", sampled)}
        structured, plain = [*self.structured, reply, following], [*self.plain, said, following]
        *_, end = ["", *SPECIAL.findall(sampled)]
        before = self.render(self.structured) + sampled.removesuffix(end)
        by_parts = self.is_structured and self.render(structured).startswith(before)
        by_text = False
        if not by_parts:
            with contextlib.suppress(TemplateError, TypeError):
                prompt, after = self.render(self.plain), self.render(plain)
                by_text = after.startswith(prompt) and after[len(prompt) :].lstrip().startswith(said["content"].strip())
        self.structured, self.plain, self.is_structured = structured, plain, not by_text
        return by_parts or by_text


@cache
def _base_tokenizer() -> Any:
    return train_tokenizer(["it yes why look"] * 3, 330, 1 << 20)


@cache
def published_tokenizer(name: str) -> Any:
    """Return a byte-level tokenizer with the template, and the special tokens that it writes."""
    tokenizer = copy.deepcopy(_base_tokenizer())
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer.bos_token = "<s>"
    written = tokenizer.chat_template
    with contextlib.suppress(TemplateError):
        written += tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(written)))})
    return tokenizer


async def run_conversation(name: str, *, calls: bool, thoughts: bool) -> str:
    """Return how each of the turns after the first continues: `=` as it was sampled, `F` as another segment.

    An `R` at the end: the template refuses the messages.
    """
    policy, tokenizer = ScriptedPolicy(), published_tokenizer(name)
    sampling = Sampling(temperature=1.0, max_new_tokens=1 << 20)
    episode = Episode(_prompt(), tokenizer, policy, sampling, request_id="r", group_id=0)
    config = HarnessConfig(path="a:b", max_turns=NUM_TURNS)
    session = Session(episode, config, ChatRenderer(tokenizer, DAY), policy, can_call=True)
    tools = [TOOL] if calls else []
    question = {"role": "user", "content": "is it?"}
    shown: list[Message] = [question]
    expected = Prediction(tokenizer, tools, [question], [question])
    found = ""
    for turn in range(NUM_TURNS):
        request = read_chat_request(json.loads(json.dumps({"messages": shown, "tools": tools})))
        if expected.refuses():
            with pytest.raises(RefusedRequestError, match=REFUSAL):
                await session.answer(request)
            return found[:-1] + "R"
        is_call, thought = calls and turn % 2 == 0, f"hm {turn}" if thoughts else ""
        reply = _reply(turn, thought, is_call=is_call, text_arguments=name in TEXT_ARGUMENTS)
        call = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {turn}}}}}\n</tool_call>'
        head = f"<think>\n{thought}\n</think>\n\n" if thoughts else ""
        try:
            sampled = expected.reply_text(reply, head + (call if is_call else f"yes {turn}"))
        except (TemplateError, TypeError):  # the reply is refused with the next request
            sampled = call
        policy.token_ids = tokenizer.encode(sampled, add_special_tokens=False)
        made = (ToolCall("look", json.dumps({"at": turn})),) if is_call else ()
        policy.parts = ParsedReply(reply["content"], thought, made)
        answered = await session.answer(request)
        _check(session, policy, found)
        message = chat_response(answered, request, tokenizer=None)["choices"][0]["message"]
        following = {"role": "user", "content": f"and {turn}?"}
        if is_call:
            key = message["tool_calls"][0]["id"]
            following = {"role": "tool", "tool_call_id": key, "name": "look", "content": f"there {turn}"}
        shown = [*shown, message, following]
        try:
            found += "=" if expected.continues(reply, sampled, following) else "F"
        except (TemplateError, TypeError):
            with pytest.raises(RefusedRequestError, match=REFUSAL):
                await session.answer(read_chat_request({"messages": shown, "tools": tools}))
            return found + "R"
    return found[:-1]


def _check(session: Session, policy: ScriptedPolicy, expected: str) -> None:
    """Compare the turns so far with the prediction, and what is trained with what was sampled."""
    got = ""
    for (first, output), (second, _) in pairwise(policy.log):
        whole = (*first.token_ids, *output.token_ids.tolist())
        got += "=" if second.token_ids[: len(whole)] == whole else "F"
    trajectories = session.trajectories(None)
    assert got == expected
    assert len(trajectories) - 1 == expected.count("F")
    assert sum(int(each.loss_mask.sum()) for each in trajectories) == sum(len(g.token_ids) for _, g in policy.log)
    assert sampled_ids(trajectories) == sorted(g.token_ids.tolist() for _, g in policy.log)


def _reply(turn: int, thought: str, *, is_call: bool, text_arguments: bool) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "" if is_call else f"yes {turn}"}
    if thought:
        reply |= {"reasoning_content": thought, "thinking": thought}
    if is_call:
        arguments: Any = json.dumps({"at": turn}) if text_arguments else {"at": turn}
        function = {"name": "look", "arguments": arguments}
        reply["tool_calls"] = [{"id": f"c{turn:05d}000", "type": "function", "function": function}]
    return reply


@cache
def _prompt() -> Prompt:
    return make_prompt(chat_tokenizer("{{ messages[0].content }}"))


@pytest.mark.skipif(not NAMES, reason=f"needs requirements/templates.txt in {FOLDER}; make test installs them")
def test_conversations_continue_and_fork_as_direct_rendering_predicts_and_as_documented() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for name in NAMES:
        plain, thoughts, calls, both = (
            asyncio.run(run_conversation(name, calls=has_calls, thoughts=has_thoughts))
            for has_calls in (False, True)
            for has_thoughts in (False, True)
        )
        after_thoughts = _name(thoughts)
        if both[1::2] and _name(both[1::2]) != after_thoughts:
            after_thoughts = f"{after_thoughts}; {_name(both[1::2])} after calls"
        renderer = ChatRenderer(published_tokenizer(name), DAY)
        found[name] = (
            _name(plain),
            after_thoughts,
            _name(calls[::2]),
            _name(both[::2]),
            "yes" if renderer.writes_tools else "no",
            "yes" if _takes_system_messages(renderer) else "no",
        )
    assert found == _documented()


async def prompts_of_mixed_turns(name: str, seed: int, *, whole: bool) -> list[tuple[int, ...]]:
    """Return the prompts of a conversation whose turns have thoughts, calls, several results and marks at random.

    Args:
        whole: render the whole conversation for each turn.
    """
    rng = random.Random(seed)
    tokenizer, policy = published_tokenizer(name), ScriptedPolicy()
    episode = Episode(
        _prompt(), tokenizer, policy, Sampling(temperature=1.0, max_new_tokens=10**6), request_id="r", group_id=0
    )
    ours = Session(
        episode, HarnessConfig(path="a:b", max_turns=100), ChatRenderer(tokenizer, DAY), policy, can_call=True
    )
    ours._summaries_hold = not whole
    shown: list[dict[str, Any]] = [{"role": "user", "content": "is it?"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "CHECKED_EXCHANGES", 0)
        for turn in range(24):
            thought = rng.choice(["", "", "hm"])
            num_calls = rng.choice([0, 0, 1, 1, 2])
            content = "" if num_calls else rng.choice(["yes", "</think> yes", "<tool_call>"])
            sampled = f"<think>\n{thought}\n</think>\n\n{content}{num_calls} calls"
            policy.token_ids = tokenizer.encode(sampled, add_special_tokens=False)
            calls = tuple(ToolCall("look", json.dumps({"at": n})) for n in range(num_calls))
            policy.parts = ParsedReply(content, thought, calls)
            request = read_chat_request({"messages": shown, "tools": [TOOL]})
            try:
                answered = await ours.answer(request)
            except RefusedRequestError:
                break
            message = chat_response(answered, request, tokenizer=None)["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": f"there {turn}"}
                for call in message.get("tool_calls", ())
            ]
            texts = [f"and {turn}?", "<tool_response>\nx\n</tool_response>"]
            shown = [*shown, message, *(results or [{"role": "user", "content": rng.choice(texts)}])]
    return [request.token_ids for request, _ in policy.log]


@pytest.mark.skipif(not NAMES, reason=f"needs requirements/templates.txt in {FOLDER}; make test installs them")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_a_few_exchanges_stand_for_the_whole_conversation(seed: int) -> None:
    num_long = 0
    for name in NAMES:
        expected = asyncio.run(prompts_of_mixed_turns(name, seed, whole=True))
        assert asyncio.run(prompts_of_mixed_turns(name, seed, whole=False)) == expected, name
        num_long += len(expected) == 24
    assert num_long > 20


def _takes_system_messages(renderer: ChatRenderer) -> bool:
    try:
        text = renderer.render([{"role": "system", "content": "be brief"}, {"role": "user", "content": "is it?"}])
    except AgentError:
        return False
    assert "be brief" in text
    return True


def _name(turns: str) -> str:
    """Return the word for turns that all have the same letter."""
    (kind,) = set(turns)
    return {"=": "appends", "F": "forks", "R": "refused"}[kind]


def _documented() -> dict[str, tuple[str, ...]]:
    """Return the cells of the table of templates in the documentation, by template."""
    table = DOCS.read_text().partition("| templates |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: tuple(cells) for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}
