"""Tokens and loss masks of conversations, compared with transformers on the same template with generation marks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from megarl.config.data import DataConfig
from megarl.data.assistant_turns import Conversation, ConversationTokenizer, Sample
from megarl.data.chat_template import PromptTemplate
from megarl.data.rows import Row
from megarl.errors import DataError
from tests.data.chat_templates import (
    CHATML,
    LLAMA,
    QWEN3,
    R1,
    SYSTEM_IN_USER,
    make_tokenizer,
    trained_texts,
    without_marks,
)
from tests.data.conftest import Tokenizer
from tests.errors import expect_error

SYSTEM = {"role": "system", "content": "Be brief."}
ASK, REPLY = {"role": "user", "content": " Hi, you \n"}, {"role": "assistant", "content": " Yes, I am here. "}
AGAIN, LAST = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}
RESULT = {"role": "tool", "content": "4", "name": "add"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def samples_of(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], *, tools: Any = (), trained: list[int] | None = None
) -> list[Sample]:
    template = PromptTemplate(DataConfig(path="rows.jsonl"), tokenizer, date(2026, 1, 31))
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    conversation = Conversation(messages=messages, trained=replies if trained is None else trained, tools=tools)
    (samples,) = ConversationTokenizer(template).samples([(Row(Path("rows.jsonl"), 1, {}), conversation)])
    return samples


@dataclass(frozen=True)
class Case:
    template: str
    messages: list[dict[str, Any]]
    eos: str = "<|im_end|>"
    tools: Any = ()


CASES = {
    "one turn": Case(CHATML, [ASK, REPLY]),
    "several turns": Case(CHATML, [SYSTEM, ASK, REPLY, AGAIN, LAST]),
    "tools": Case(CHATML, [AGAIN, CALL, RESULT, LAST], tools=TOOLS),
    "two replies in a row": Case(CHATML, [ASK, REPLY, LAST]),
    "another stop token than the template's": Case(CHATML, [ASK, REPLY, AGAIN, LAST], eos="<|eot|>"),
    "stripped texts": Case(LLAMA, [SYSTEM, ASK, REPLY, AGAIN, LAST], eos="<|eot|>"),
    "system text in the user's": Case(SYSTEM_IN_USER, [SYSTEM, ASK, REPLY, AGAIN, LAST], eos="<|eot|>"),
    "thoughts kept within a turn": Case(QWEN3, [AGAIN, THOUGHT]),
}


@pytest.mark.parametrize("with_marks", [False, True], ids=["no marks", "marks"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_mask_are_those_of_transformers(name: str, with_marks: bool) -> None:
    case = CASES[name]
    tokenizer = make_tokenizer(case.template, eos=case.eos)
    expected = tokenizer.apply_chat_template(
        case.messages, tools=list(case.tools) or None, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = expected["assistant_masks"]
    size = len(mask) - mask[::-1].index(1)  # a sample ends with its last trained token
    if not with_marks:
        tokenizer.chat_template = without_marks(case.template)
    (sample,) = samples_of(tokenizer, case.messages, tools=case.tools)
    assert sample.token_ids.tolist() == expected["input_ids"][:size]
    assert sample.loss_mask.astype(int).tolist() == mask[:size]
    assert tokenizer.decode(expected["input_ids"][size:]) in ("", "\n")


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_per_turn() -> None:
    tokenizer = make_tokenizer(without_marks(QWEN3))
    other = {"role": "assistant", "content": "<think>\nwell\n</think>\n\n5"}
    messages = [AGAIN, THOUGHT, ASK, other]
    first, second = samples_of(tokenizer, messages)
    assert tokenizer.decode(first.token_ids) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n4<|im_end|>"
    )
    assert tokenizer.decode(second.token_ids) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n Hi, you \n<|im_end|>\n<|im_start|>assistant\n<think>\nwell\n</think>\n\n5<|im_end|>"
    )
    assert trained_texts(tokenizer, first) == ["<think>\nhm\n</think>\n\n4<|im_end|>"]
    assert trained_texts(tokenizer, second) == ["<think>\nwell\n</think>\n\n5<|im_end|>"]
    for sample, at in ((first, 1), (second, 3)):  # each turn follows the prompt that generation would start from
        prompt = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, return_dict=False)
        assert sample.token_ids[~sample.loss_mask].tolist() == prompt


def test_turns_between_which_nothing_is_rewritten_share_a_sample() -> None:
    """Thoughts before a call of a tool are shown until the next message of the user."""
    tokenizer = make_tokenizer(without_marks(QWEN3))
    asked = {"role": "assistant", "content": "<think>\nask\n</think>\n\nadd"}
    first, second = samples_of(tokenizer, [AGAIN, asked, RESULT, THOUGHT, ASK, LAST])
    assert trained_texts(tokenizer, first) == [
        "<think>\nask\n</think>\n\nadd<|im_end|>",
        "<think>\nhm\n</think>\n\n4<|im_end|>",
    ]
    assert trained_texts(tokenizer, second) == ["<think>\n\n</think>\n\n4<|im_end|>"]


def test_only_chosen_turns_are_trained_on_and_later_messages_are_left_out() -> None:
    tokenizer = make_tokenizer(without_marks(CHATML))
    messages = [ASK, REPLY, AGAIN, LAST, ASK, REPLY, AGAIN]
    (sample,) = samples_of(tokenizer, messages, trained=[3])
    assert trained_texts(tokenizer, sample) == ["4<|im_end|>"]
    assert tokenizer.decode(sample.token_ids).endswith("4<|im_end|>")
    (sample,) = samples_of(tokenizer, messages, trained=[1, 5])
    assert trained_texts(tokenizer, sample) == [" Yes, I am here. <|im_end|>"] * 2


def test_the_head_of_a_turn_may_open_the_thought() -> None:
    tokenizer = make_tokenizer(R1, eos="<|eot|>")
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    first, second = samples_of(tokenizer, [AGAIN, thought, ASK, {**thought, "content": "<think>me</think>Yes"}])
    assert tokenizer.decode(first.token_ids) == "<bos><|user|>2+2?<|head|><think>\nhm\n</think>\n\n4<|eot|>"
    assert trained_texts(tokenizer, first) == ["hm\n</think>\n\n4<|eot|>"]
    assert tokenizer.decode(second.token_ids) == (
        "<bos><|user|>2+2?<|head|>\n\n4<|eot|><|user|> Hi, you \n<|head|><think>\nme</think>Yes<|eot|>"
    )
    with expect_error(DataError, "rows.jsonl:1", "message 2", "<think>"):
        samples_of(tokenizer, [AGAIN, LAST])


def test_thoughts_that_a_template_drops_are_trained_on() -> None:
    tokenizer = make_tokenizer(R1.replace("<think>\n", ""), eos="<|eot|>")
    (sample,) = samples_of(tokenizer, [AGAIN, THOUGHT])
    assert trained_texts(tokenizer, sample) == ["<think>\nhm\n</think>\n\n4<|eot|>"]


def test_a_token_across_the_end_of_the_prompt_is_not_trained_on() -> None:
    """The reply begins with a newline that the tokenizer would merge with that of the template."""
    template = "{% for m in messages %}{{ m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    tokenizer = make_tokenizer(template)
    reply = {"role": "assistant", "content": "\n4"}
    assert len(tokenizer("a\n\n4")["input_ids"]) < len(tokenizer("a\n")["input_ids"] + tokenizer("\n4")["input_ids"])
    first, second = samples_of(tokenizer, [AGAIN, reply, ASK, LAST])
    prompt = tokenizer("user\n2+2?<|im_end|>assistant\n")["input_ids"]
    assert first.token_ids.tolist() == prompt + tokenizer("\n4<|im_end|>")["input_ids"]
    assert first.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(first.token_ids) - len(prompt))
    assert trained_texts(tokenizer, second) == ["4<|im_end|>"]
    assert (
        second.token_ids.tolist()
        == tokenizer("user\n2+2?<|im_end|>assistant\n\n4<|im_end|>user\n Hi, you \n<|im_end|>assistant\n4<|im_end|>")[
            "input_ids"
        ]
    )


@pytest.mark.parametrize(
    ("template", "runs"),
    [
        # no token ends a turn: only the text is trained on
        ("{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}", ["a", "b"]),
        # the next message begins with the token at which generation ends
        (
            "{% for m in messages %}{{ '<|im_end|>' + m.role + ':\n' + m.content }}{% endfor %}",
            ["a<|im_end|>", "b<|im_end|>"],
        ),
        # the last turn is ended in another way than earlier ones
        (
            "{% for m in messages %}{{ m.role + ':\n' + m.content }}"
            "{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}",
            ["a<|im_end|>", "b<|im_end|>"],
        ),
    ],
)
def test_the_end_of_a_turn_is_as_the_template_writes_it(template: str, runs: list[str]) -> None:
    start = "<|im_end|>" if "'<|im_end|>' + m.role" in template else ""
    if "loop.last" in template:
        template = template.replace("not loop.last", "not loop.last or add_generation_prompt")
    tokenizer = make_tokenizer(f"{template}{{% if add_generation_prompt %}}{start}assistant:\n{{% endif %}}")
    replies = [{"role": "assistant", "content": text} for text in "ab"]
    (sample,) = samples_of(tokenizer, [ASK, replies[0], AGAIN, replies[1]])
    assert trained_texts(tokenizer, sample) == runs


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|eot|>"])
def test_turns_that_do_not_end_generation_are_reported(eos: str, caplog: pytest.LogCaptureFixture) -> None:
    samples_of(make_tokenizer(without_marks(CHATML), eos=eos), [AGAIN, LAST])
    assert ("'<|im_end|>', but generation ends only at '<|eot|>'" in caplog.text) == (eos == "<|eot|>")


def test_tokens_of_a_tokenizer_whose_texts_cannot_be_cut() -> None:
    """A special token takes the white space before it."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|eot|>", lstrip=True)]})
    messages = [{"role": "user", "content": "Hi  <|eot|> you"}, REPLY]
    expected = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    (sample,) = samples_of(tokenizer, messages)
    assert sample.token_ids.tolist() == expected[: len(sample.token_ids)]
    assert len(tokenizer("  <|eot|>")["input_ids"]) == 1


def test_a_stop_token_at_the_end_of_a_text_is_not_repeated() -> None:
    tokenizer = make_tokenizer(without_marks(CHATML))
    (expected,) = samples_of(tokenizer, [AGAIN, LAST, ASK, REPLY])
    (got,) = samples_of(tokenizer, [AGAIN, {**LAST, "content": "4<|im_end|>"}, ASK, REPLY])
    assert got.token_ids.tolist() == expected.token_ids.tolist()


def test_marks_narrow_what_is_trained_on() -> None:
    template = CHATML.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    tokenizer = make_tokenizer(template)
    (sample,) = samples_of(tokenizer, [AGAIN, {**CALL, "content": "calling"}, RESULT, LAST])
    assert [text[:11] for text in trained_texts(tokenizer, sample)] == ["<tool_call>", "<|im_end|>"]
    tokenizer.chat_template = (
        QWEN3.replace("{%- generation -%}", "")
        .replace("{% endgeneration %}", "")
        .replace(
            "{%- else %}{{ m.content + '<|im_end|>' }}",
            "{%- else %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}",
        )
    )
    with expect_error(DataError, "rows.jsonl:1", "generation"):
        samples_of(tokenizer, [AGAIN, LAST])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASK, {"role": "assistant", "content": " "}], ["message 2", "no text"]),
        ([REPLY, ASK, LAST], ["message 1", "before it"]),
        ([ASK, {"role": "assistant", "content": "a<|im_end|>b"}], ["message 2", "<|im_end|>"]),
        ([ASK, {"role": "assistant", "content": "a", "reasoning_content": "hm"}], ["message 2", "reasoning_content"]),
        ([ASK, {**CALL, "content": "shout"}], ["message 2", "its text"]),
        (
            [ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "drop"}}]}],
            ["message 2", "calls"],
        ),
        ([ASK, CALL, {**RESULT, "role": "mute"}, LAST], ["message 3", "mute"]),
    ],
)
def test_turns_that_generation_could_not_give_are_refused(messages: list[dict[str, Any]], words: list[str]) -> None:
    template = without_marks(CHATML).replace("{{ m.content }}", "{{ m.content | replace('shout', 'SHOUT') }}")
    template = template.replace("m.tool_calls or []", "(m.tool_calls or []) if call.function.name != 'drop'")
    template = template.replace("in messages", "in messages if m.role != 'mute'")
    with expect_error(DataError, "rows.jsonl:1", *words):
        samples_of(make_tokenizer(template), messages)


def test_tools_that_a_template_does_not_write_are_refused() -> None:
    with expect_error(DataError, "rows.jsonl:1", "tools"):
        samples_of(make_tokenizer(LLAMA), [ASK, LAST], tools=TOOLS)


def test_a_template_that_fails_is_reported_with_the_line() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with expect_error(DataError, "rows.jsonl:1", "roles must alternate"):
        samples_of(tokenizer, [ASK, LAST])
