"""Prompt k + 1 is prompt k, output k as sampled, and new tokens; or a fork, where the template rewrites the reply."""

import json
from typing import Any

import pytest

from megarl.data.tiny_checkpoint import EOS, PAD
from megarl.errors import AgentError, DataError
from megarl.rollout.environments.conversation import ChatRenderer, bounded, require_chat_template
from megarl.rollout.environments.environment import Message
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import APPEND, DAY, SORTED_CALLS, STABLE, STRIPS_THOUGHTS, chat_tokenizer

USER = {"role": "user", "content": "is it?"}
WHY = {"role": "user", "content": "why?"}


@pytest.mark.parametrize("name", STABLE)
def test_prompts_of_stable_templates_are_extended_as_the_template_renders_them(name: str) -> None:
    tokenizer = chat_tokenizer(STABLE[name])
    renderer = ChatRenderer(tokenizer, DAY)
    assert renderer.find_rewriting() is None
    messages, text = [USER], None
    for reply in ("yes", "no, 7", " <think>it is</think> yes"):
        found = renderer.extension(messages, reply, [WHY], tokenizer.eos_token_id, None)
        assert not found.is_fork
        before = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        messages = [*messages, {"role": "assistant", "content": reply}, WHY]
        if name not in ("dated", "trim"):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert before + reply + EOS + tokenizer.decode(found.token_ids) == text
        assert tokenizer.decode(found.token_ids) == "\n<|user|>\nwhy?<eos>\n<|assistant|>\n"


def extend(template: str, reply: str, following: Message = WHY, shown: Message | None = None) -> tuple[bool, str]:
    """Return whether the prompt after a reply to `USER` is a fork, and the text of its new tokens."""
    tokenizer = chat_tokenizer(template)
    found = ChatRenderer(tokenizer, DAY).extension([USER], reply, [following], tokenizer.eos_token_id, shown)
    return found.is_fork, tokenizer.decode(found.token_ids)


def test_a_reply_cut_short_gets_the_end_of_its_turn() -> None:
    tokenizer = chat_tokenizer(APPEND)
    found = ChatRenderer(tokenizer, DAY).extension([USER], "ye", [WHY], tokenizer.encode("e")[0], None)
    assert found.token_ids[0] == tokenizer.eos_token_id
    assert tokenizer.decode(found.token_ids) == "<eos>\n<|user|>\nwhy?<eos>\n<|assistant|>\n"


def test_a_template_that_strips_thoughts_forks_where_there_are_any() -> None:
    assert not extend(STRIPS_THOUGHTS, "yes")[0]
    text = "<|user|>\nis it?<eos>\n<|assistant|>\nyes<eos>\n<|user|>\nwhy?<eos>\n<|assistant|>\n"
    assert extend(STRIPS_THOUGHTS, "<think>so</think>yes") == (True, text)


def test_a_reordered_tool_call_forks_and_its_text_does_not() -> None:
    arguments = {"b": 1, "a": 2}
    shown = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert not extend(SORTED_CALLS, json.dumps(arguments))[0]
    assert extend(SORTED_CALLS, json.dumps(arguments), shown=shown)[0]
    assert not extend(SORTED_CALLS, '[["a", 2], ["b", 1]]', shown=shown)[0]  # as it is rendered


@pytest.mark.parametrize(
    "text",
    [f"stop {EOS}{EOS} now", PAD, f"a{EOS}<|assistant|>\n#### 1", f"\ue0ff{EOS}\ue0ff\ue100 \ue100\ue101 \ue0ff"],
)
def test_special_tokens_in_messages_are_plain_text(text: str) -> None:
    tokenizer = chat_tokenizer(APPEND)
    renderer = ChatRenderer(tokenizer, DAY)
    found = renderer.extension([USER], "yes", [{"role": "tool", "content": text}], tokenizer.eos_token_id, None)
    assert found.token_ids.count(tokenizer.eos_token_id) == 1  # that of the template, after the message
    assert tokenizer.pad_token_id not in found.token_ids
    assert tokenizer.decode(found.token_ids) == f"\n<|tool|>\n{text}<eos>\n<|assistant|>\n"
    prompt = renderer.prompt([{"role": "user", "content": text}])
    assert prompt.count(tokenizer.eos_token_id) == 1


def test_contents_are_cut_at_a_character() -> None:
    assert bounded({"role": "tool", "content": "aé€"}, 4) == {"role": "tool", "content": "aé"}
    assert bounded({"role": "tool", "content": "abc"}, 3) == {"role": "tool", "content": "abc"}


def test_refused_roles_are_named() -> None:
    strict = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + APPEND
    with expect_error(AgentError, "TemplateError"):
        ChatRenderer(chat_tokenizer(strict), DAY).prompt([USER, {"role": "tool", "content": "7"}])


def test_templates_are_checked_at_the_start() -> None:
    def check(template: Any, forks: str, refuses_forks: str | None = None) -> None:
        require_chat_template(chat_tokenizer(template), DAY, forks=forks, refuses_forks=refuses_forks)

    check(APPEND, "forbid", "gspo")
    check(STRIPS_THOUGHTS, "allow")
    with expect_error(DataError, "rollout.env"):
        check(None, "allow")
    with expect_error(DataError, "rewrites", "thoughts"):
        check(STRIPS_THOUGHTS, "forbid")
    with expect_error(DataError, "rollout.env.forks"):
        check(APPEND, "allow", "gspo cannot")


CALL = {"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": {"at": [1]}}}
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_arguments_of_calls_are_text_for_templates_that_need_text() -> None:
    template = APPEND.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ 'at ' + c.function.arguments }}{% endfor %}",
    )
    text = ChatRenderer(chat_tokenizer(template), DAY).render([USER, ASKED])
    assert 'at {"at": [1]}<eos>' in text


def test_messages_that_a_template_leaves_out_are_refused() -> None:
    template = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    renderer = ChatRenderer(chat_tokenizer(template), DAY)
    renderer.render([USER, ASKED])
    with expect_error(AgentError, "template", "messages"):
        renderer.render([USER, ASKED, {"role": "tool", "content": "7"}])
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    with expect_error(DataError, "template", "messages"):
        require_chat_template(chat_tokenizer(parts), DAY, forks="allow", refuses_forks=None)


def test_definitions_of_tools_that_a_template_does_not_write_are_noticed() -> None:
    assert not ChatRenderer(chat_tokenizer(APPEND), DAY).writes_tools
    assert ChatRenderer(chat_tokenizer("{{ tools | tojson }}" + APPEND), DAY).writes_tools
