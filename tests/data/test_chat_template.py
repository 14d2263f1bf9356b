"""Variables, tools, names and ends of chat templates, compared with transformers' own rendering."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megarl.config.data import DataConfig
from megarl.config.engine_options import find_option_problems
from megarl.config.load import make_config
from megarl.config.run import SftConfig
from megarl.controller.preflight.data_checks import find_template_notices, find_template_variables
from megarl.data.chat_template import PromptTemplate
from megarl.data.demonstrations import load_demonstrations
from megarl.data.prompts import tokenize_prompts
from megarl.data.rows import Row
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.model_files.model_config import copy_companions
from tests.data.conftest import CHAT_TEMPLATE, Jsonl, Tokenizer
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import DAY

THINKS = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_DATE = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}"
    "{% endif %}{% endif %}{{ date_string }}" + CHAT_TEMPLATE
)
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
USER, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo  "}


def texts(path: Path, tokenizer: Tokenizer, **config: Any) -> list[str]:
    (source,) = DataConfig(path=str(path), template_date=DAY, **config).resolved_sources
    return [each.text for each in tokenize_prompts(source, tokenizer, path=str(path), max_prompt_tokens=999)]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_variables_reach_the_template_as_in_transformers(jsonl: Jsonl, tokenizer: Tokenizer, kwargs: Any) -> None:
    tokenizer.chat_template = THINKS
    expected = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **kwargs)
    assert texts(jsonl({"prompt": "Hi"}), tokenizer, chat_template_kwargs=kwargs) == [expected]
    config = DataConfig(path=str(jsonl({"prompt": "Hi", "response": "Yo"})), chat_template_kwargs=kwargs)
    (sample,) = load_demonstrations(config, tokenizer, max_tokens=99)
    assert tokenizer.decode(sample.token_ids) == expected + "Yo<eos>"


def test_sources_may_have_their_own_variables() -> None:
    sources = {
        "a": {"path": "a.jsonl", "ratio": 0.5, "chat_template_kwargs": {"enable_thinking": False}},
        "b": {"path": "b.jsonl", "ratio": 0.5},
    }
    config = DataConfig.model_validate({"sources": sources, "chat_template_kwargs": {"reasoning_effort": "low"}})
    found = [source.config.chat_template_kwargs for source in config.resolved_sources]
    assert found == [{"enable_thinking": False}, {"reasoning_effort": "low"}]


@pytest.mark.parametrize(
    "name", ["tokenize", "add_generation_prompt", "messages", "tools", "strftime_now", "chat_template", "no-name"]
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DataConfig(path="a.jsonl", chat_template_kwargs={name: True})
    with pytest.raises(ValueError, match="JSON"):
        DataConfig(path="a.jsonl", chat_template_kwargs={"date_string": DAY})


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_of_rows_reach_the_template(jsonl: Jsonl, tokenizer: Tokenizer, tools: Any) -> None:
    tokenizer.chat_template = WITH_TOOLS
    expected = tokenizer.apply_chat_template([USER], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    path = jsonl({"prompt": "Hi", "tools": tools}, {"prompt": "Hi", "tools": []}, {"prompt": "Hi", "tools": None})
    assert texts(path, tokenizer) == [expected, *["<user>Hi<eos><assistant>"] * 2]


def test_tools_that_no_template_writes_are_refused(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = jsonl({"prompt": "Hi"}, {"prompt": "Hi", "tools": [TOOL]})
    with expect_error(DataError, "rows.jsonl:2", "tools need a chat template"):
        texts(path, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    with expect_error(DataError, "rows.jsonl:2", "'tools'", "data.fields.tools"):
        texts(path, tokenizer)


def test_a_named_template_is_chosen(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = {"rag": "rag " + CHAT_TEMPLATE, "default": CHAT_TEMPLATE, "tool_use": WITH_TOOLS}
    path = jsonl({"prompt": "Hi"})
    assert texts(path, tokenizer, chat_template_name="rag") == ["rag <user>Hi<eos><assistant>"]
    assert texts(path, tokenizer) == ["<user>Hi<eos><assistant>"]
    with_tools = jsonl({"prompt": "Hi", "tools": [TOOL]}, name="tools.jsonl")
    assert texts(with_tools, tokenizer)[0].startswith('[{"type"')
    with expect_error(DataError, "data.chat_template_name", "'none'", "default, rag, tool_use"):
        texts(path, tokenizer, chat_template_name="none")
    del tokenizer.chat_template["default"]
    with expect_error(DataError, "data.chat_template_name", "rag, tool_use"):
        texts(path, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    assert texts(path, tokenizer, chat_template_name="default") == ["<user>Hi<eos><assistant>"]


@pytest.mark.parametrize("is_list", [False, True])
def test_all_named_templates_are_exported(tiny_model: Path, tmp_path: Path, jsonl: Jsonl, is_list: bool) -> None:
    """From the folder of transformers 5, and from the list in tokenizer_config.json of older versions."""
    model, exported = tmp_path / "model", tmp_path / "exported"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    templates = {"default": CHAT_TEMPLATE, "rag": "rag " + CHAT_TEMPLATE}
    if is_list:
        config = json.loads((model / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (model / "chat_template.jinja").write_text(templates["default"])
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "rag.jinja").write_text(templates["rag"])
    exported.mkdir()
    copy_companions(model, exported)
    shutil.copy(model / "config.json", exported)
    for folder in (model, exported):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.chat_template == templates
        assert texts(jsonl({"prompt": "Hi"}), tokenizer, chat_template_name="rag") == ["rag <user>Hi<eos><assistant>"]


def test_the_date_of_a_run_and_a_date_of_the_configuration(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template, path = LLAMA_DATE, jsonl({"prompt": "Hi"})
    assert texts(path, tokenizer)[0].startswith(DAY.strftime("%d %b %Y") + "<user>")
    fixed = {"date_string": "01 Feb 2020"}
    assert texts(path, tokenizer, chat_template_kwargs=fixed)[0].startswith("01 Feb 2020<user>")


@pytest.mark.parametrize("prompt", ["Hi", "<pad>Hi", "<pad><pad>Hi"])
@pytest.mark.parametrize("chat", ["never", "always"])
def test_prompts_have_one_bos(jsonl: Jsonl, tokenizer: Tokenizer, prompt: str, chat: str) -> None:
    bos = tokenizer.pad_token_id
    tokenizer.bos_token = "<pad>"
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", bos)])
    path = jsonl({"prompt": prompt})
    (source,) = DataConfig(path=str(path), chat_template=chat).resolved_sources
    (got,) = tokenize_prompts(source, tokenizer, path=str(path), max_prompt_tokens=99)
    assert list(got.token_ids) == [bos, *tokenizer("Hi", add_special_tokens=False)["input_ids"]]


def end_tokenizer(tiny_model: Path, tmp_path: Path, *stops: str) -> Tokenizer:
    """Return a tokenizer with eos `<eos>`, a ChatML template, and these stop tokens in generation_config.json."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokenizer)}))
    ids = [tokenizer.convert_tokens_to_ids(each) for each in ("<eos>", *stops)]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return load_tokenizer(model)


@pytest.mark.parametrize("stops", [(), ("<|im_end|>",)])
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("b", None),
        ("b<|im_end|>", "b<|im_end|>"),
        ("b<|im_end|>\n", "b<|im_end|>"),
        ("b<|im_end|>\n<eos>", "b<|im_end|>"),
        ("b<eos>", "b<eos>"),
        ("b<eos><eos>\n", "b<eos>"),
        ("b<eos>c", None),
    ],
)
def test_responses_have_one_end(
    tiny_model: Path, tmp_path: Path, jsonl: Jsonl, response: str, expected: str | None, stops: tuple[str, ...]
) -> None:
    tokenizer = end_tokenizer(tiny_model, tmp_path, *stops)
    path = jsonl({"prompt": "Hi", "response": response})
    (sample,) = load_demonstrations(DataConfig(path=str(path)), tokenizer, max_tokens=99)
    end = "<|im_end|>" if stops else "<eos>"
    trained = sample.token_ids[sample.loss_mask].tolist()
    assert trained == tokenizer(expected or response + end, add_special_tokens=False)["input_ids"]


def rows_of(*messages: dict[str, Any]) -> Row:
    return Row(Path("d.jsonl"), 3, {"prompt": [*messages]})


def test_messages_that_end_with_the_assistant_are_never_answered_twice(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE

    def render(rule: Any, *messages: dict[str, Any]) -> str:
        return PromptTemplate(DataConfig(path="d", last_assistant=rule), tokenizer, DAY).render(rows_of(*messages))

    with expect_error(DataError, "d.jsonl:3", "data.last_assistant: drop", "data.last_assistant: continue"):
        render("error", USER, SAID)
    assert render("drop", USER, SAID, SAID) == "<user>Hi<eos><assistant>"
    with expect_error(DataError, "d.jsonl:3", "data.last_assistant: drop"):
        render("drop", SAID)
    expected = tokenizer.apply_chat_template([USER, SAID], tokenize=False, continue_final_message=True)
    assert render("continue", USER, SAID) == expected == "<user>Hi<eos><assistant>Yo  "
    assert render("continue", USER) == "<user>Hi<eos><assistant>"


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (THINKS, {"enable_thinking"}),
        (LLAMA_DATE, {"date_string"}),
        ("{% for m in messages %}{% generation %}{{ effort }}{% endgeneration %}{% break %}{% endfor %}", {"effort"}),
        ("{% set a = 1 %}{{ a }}{# enable_thinking #}{{ 'enable_thinking' }}", set()),
    ],
)
def test_variables_that_a_template_reads_are_found(template: str, names: set[str]) -> None:
    known = {"messages", "add_generation_prompt", "eos_token", "strftime_now"}
    assert find_template_variables(template) - known == names


def test_variables_without_effect_and_turns_without_a_stop_token_are_reported(
    tiny_model: Path, tmp_path: Path, jsonl: Jsonl
) -> None:
    def notices(folder: Path, **data: Any) -> list[str]:
        path = str(jsonl({"prompt": "Hi", "response": "Yo"}))
        tree = {"run_dir": "run", "model": {"path": str(folder)}, "data": {"path": path, **data}}
        return [*find_template_notices(make_config(SftConfig, {**tree, "trainer": {"steps": 1}}, []))]

    for name, stops in {"wrong": (), "right": ("<|im_end|>",)}.items():
        end_tokenizer(tiny_model, tmp_path / name, *stops)
    (notice,) = notices(tmp_path / "wrong" / "model")
    assert "'<|im_end|>" in notice
    assert "generation_config.json" in notice
    assert "'<eos>' (" in notice
    assert notices(tmp_path / "wrong" / "model", chat_template="never") == []
    right = tmp_path / "right" / "model"
    assert notices(right) == []
    (notice,) = notices(right, chat_template_kwargs={"enable_thinking": False})
    assert notice.startswith("data.chat_template_kwargs.enable_thinking has no effect")
    (right / "chat_template.jinja").write_text(CHATML + "{{ enable_thinking }}")
    assert notices(right, chat_template_kwargs={"enable_thinking": False}) == []


def test_a_bad_variable_names_its_key() -> None:
    with expect_error(ConfigError, "data.chat_template_kwargs", "messages"):
        tree = {"run_dir": "run", "data": {"path": "a.jsonl", "chat_template_kwargs": {"messages": []}}}
        make_config(SftConfig, {**tree, "model": {"path": "m"}, "trainer": {"steps": 1}}, [])


@pytest.mark.parametrize("name", ["chat_template", "hf_chat_template_name", "default_chat_template_kwargs"])
def test_engines_take_no_chat_template_of_their_own(name: str) -> None:
    """They get token ids of what megarl has rendered."""
    (problem,) = find_option_problems({name: "x"})
    assert problem == f"{name}: engines have no HTTP server and no tokenizer: requests and answers are token ids"
