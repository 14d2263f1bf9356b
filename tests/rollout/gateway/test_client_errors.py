"""Mistakes of clients are errors of status 4xx in the form of the API, options that do not apply are named."""

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway import server
from megarl.rollout.gateway.session import Session
from megarl.text import has_surrogate
from tests.rollout.clock import jump
from tests.rollout.gateway.clients import ask_raw
from tests.rollout.gateway.scripted import SeededEngine, logged_ids, make_agent, make_prompt, run_groups, sampled_ids
from tests.rollout.gateway.test_sessions import TOOL, answers, chat, send, texts

ASKED = [{"role": "user", "content": "is it?"}]
CHAT = {"messages": ASKED}
RESPONSES = {"input": ASKED}
MESSAGES = {"messages": ASKED, "max_tokens": 100}
PATHS = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES, "messages/count_tokens": MESSAGES}

WRONG = (
    5,
    -1,
    1.5,
    True,
    "x",
    [5],
    [[]],
    ["x"],
    {"a": 5},
    [{"type": 5}],
    [{"role": 5}],
    [{"role": "user", "content": 5}],
)
"""Values of wrong types for most fields; some suit a field, and are then answered."""

FIELDS = {
    "chat/completions": (
        *("messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("stop", "logprobs", "top_logprobs", "n", "model", "response_format", "temperature", "logit_bias", "metadata"),
    ),
    "responses": (
        *("input", "tools", "tool_choice", "stream", "max_output_tokens", "model", "text", "reasoning", "metadata"),
        *("instructions", "truncation", "include", "store", "stream_options", "conversation", "prompt"),
    ),
    "messages": (
        *("messages", "system", "tools", "tool_choice", "stream", "max_tokens", "stop_sequences", "model", "thinking"),
        *("metadata", "top_k"),
    ),
}
FIELDS["messages/count_tokens"] = ("messages", "system", "tools")

MESSAGE_FIELDS = ("content", "tool_calls", "tool_call_id", "name", "role", "function_call", "type", "output", "call_id")


async def post_raw(task: Task, base_url: str, api_key: str, *, requests: list[Any]) -> None:
    """Send requests `[method, path, headers, body]` one after the other and keep the responses."""
    answers.clear()
    root = base_url.partition("/s/")[0]
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        for method, path, headers, body in requests:
            headers = {key: value.replace("KEY", api_key) for key, value in headers.items()}
            url = f"{root}{path}" if path.startswith("/") else f"{base_url}/{path}"
            content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
            answers.append(await client.request(method, url, headers=headers, content=content))


def send_raw(tokenizer: Any, *requests: Any) -> Any:
    """Return the trajectories of an episode that sends the requests and then a good one, which is answered."""
    good = ("POST", "chat/completions", {}, json.dumps(chat("the good one")))
    agent = make_agent(tokenizer, post_raw, kwargs={"requests": [*requests, good]}, max_turns=10**6)
    engine = SeededEngine(tokenizer, reply=lambda prompt: "yes")
    ((summary, trajectories),) = run_groups(engine, agent, [make_prompt(tokenizer)], max_new_tokens=10**6)
    assert answers[-1].status_code == 200
    assert summary.kept == (0,)
    assert sampled_ids(trajectories) == logged_ids(engine)
    return trajectories


def check_error(response: httpx.Response, *statuses: int) -> str:
    """Return the message of an error, which is in the form of the API of its path."""
    assert response.status_code in statuses, (response.request.url, response.request.content, response.text)
    body = response.json()
    if "/v1/messages" in response.request.url.path:
        assert body["type"] == "error"
        assert body["error"]["type"] in ("invalid_request_error", "not_found_error", "request_too_large")
    else:
        assert body["error"]["type"] == "invalid_request_error"
        assert {"code", "param"} <= body["error"].keys()
    assert body["error"]["message"]
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
def test_values_of_wrong_types_are_never_a_fault_of_the_server(tokenizer: Any, path: str) -> None:
    bodies = [{**PATHS[path], field: value} for field in FIELDS[path] for value in WRONG]
    name = "input" if path == "responses" else "messages"
    for role in ("user", "assistant", "tool"):
        for field in MESSAGE_FIELDS:
            bodies += [{**PATHS[path], name: [{"role": role, "content": "x", field: value}, *ASKED]} for value in WRONG]
    send_raw(tokenizer, *(("POST", path, {}, json.dumps(body)) for body in bodies))
    for body, answer in zip(bodies, answers, strict=False):
        if answer.status_code != 200:
            message = check_error(answer, 400)
            assert len(message) < 500, body
    assert sum(answer.status_code == 400 for answer in answers) > len(bodies) / 4


BROKEN = {
    "surrogate": r'{"messages": [{"role": "user", "content": "a\ud800b"}]}',
    "raw surrogate": '{"messages": [{"role": "user", "content": "a\ud800b"}]}',
    "nested lists": "[" * 100_000,
    "nested objects": '{"messages": ' + '{"a":' * 100_000,
    "nested tool": json.dumps(chat("x"))[:-1] + ', "tools": ' + "[" * 5000 + "]" * 5000 + "}",
    "digits": '{"messages": [], "max_tokens": ' + "9" * 5000 + "}",
    "not a number": '{"messages": [], "max_tokens": NaN}',
    "no JSON": "messages=x",
    "empty": "",
    "a list": "[]",
    "a text": '"x"',
    "null": "null",
}


def test_bodies_that_are_no_json_are_refused(tokenizer: Any) -> None:
    requests = [("POST", path, {}, body) for path in PATHS for body in BROKEN.values()]
    good, latin = json.dumps(CHAT), {"Content-Type": "application/json; charset=latin-1"}
    banana = {"Content-Type": "application/json; charset=banana"}
    requests += [("POST", "chat/completions", banana, good), ("POST", "messages", banana, good)]
    requests += [("POST", "chat/completions", {"Content-Encoding": "gzip"}, good)]
    requests += [("POST", "chat/completions", {}, b'{"messages": "\xff"}')]
    send_raw(tokenizer, *requests, ("POST", "chat/completions", latin, good))
    for answer in answers[:-2]:
        check_error(answer, 400)
    assert answers[-2].status_code == 200


def test_wrong_paths_methods_and_sizes_are_json_errors(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    requests = [
        ("POST", "embeddings", {}, "{}"),
        ("GET", "/nowhere", {}, ""),
        ("GET", "chat/completions", {}, ""),
        ("DELETE", "messages", {}, ""),
        ("POST", "messages/batches", {}, "{}"),
        ("POST", "chat/completions", {}, json.dumps(chat("x" * 2000))),
        ("POST", "messages", {}, json.dumps(chat("x" * 2000))),
    ]
    send_raw(tokenizer, *requests)
    statuses = (404, 404, 405, 405, 404, 413, 413)
    for answer, status in zip(answers, statuses, strict=False):
        check_error(answer, status)
    assert answers[2].headers["Allow"] == "POST"


def test_keys_are_taken_from_each_header_that_clients_use(tokenizer: Any) -> None:
    body = json.dumps(CHAT)
    headers = [{"Authorization": "bearer KEY"}, {"authorization": "BEARER  KEY"}, {"x-api-key": "KEY"}]
    wrong = [{"Authorization": "KEY"}, {"x-api-key": "other"}, {}]
    send_raw(tokenizer, *(("POST", "/v1/chat/completions", each, body) for each in (*headers, *wrong)))
    assert [answer.status_code for answer in answers[:-1]] == [200, 200, 200, 401, 401, 401]


def test_a_fault_of_the_gateway_is_logged_and_answered_and_the_run_continues(tokenizer, monkeypatch, caplog) -> None:
    def fail(self: Session, request: Any) -> int:
        raise ZeroDivisionError("\ud800")

    monkeypatch.setattr(Session, "count_prompt_tokens", fail)
    send_raw(tokenizer, ("POST", "messages/count_tokens", {}, json.dumps(MESSAGES)))
    assert answers[0].status_code == 500
    assert answers[0].json()["error"]["type"] == "api_error"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "in fail" in caplog.text
    assert not has_surrogate(caplog.text)


async def send_half_a_body(task: Task, base_url: str, api_key: str) -> None:
    url = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(f"POST {url.path}/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    await writer.drain()
    await asyncio.sleep(0.1)  # in which the beginning may arrive
    jump(2 * server.READ_TIMEOUT_SECONDS)
    late.append((await reader.readline()).decode())
    writer.close()
    await ask_raw(base_url, api_key, ASKED)


late: list[str] = []


def test_a_body_that_does_not_arrive_is_not_waited_for(tokenizer: Any) -> None:
    run_groups(SeededEngine(tokenizer), make_agent(tokenizer, send_half_a_body), [make_prompt(tokenizer)])
    assert late == ["HTTP/1.1 408 Request Timeout\r\n"]


UNAPPLIED = {
    "chat/completions": {
        **dict.fromkeys(("temperature", "top_p", "presence_penalty", "min_p", "typical_p", "length_penalty"), 0.5),
        **dict.fromkeys(("top_k", "seed", "min_tokens", "prompt_logprobs", "best_of_n"), 3),
        **{key: {"a": 1} for key in ("guided_json", "json_schema", "structured_outputs")},
        **dict.fromkeys(("regex", "ebnf", "reasoning_effort", "custom_logit_processor", "user", "service_tier"), "low"),
        **{key: ["x"] for key in ("stop_token_ids", "logits_processors", "functions", "modalities", "bad_words")},
        **dict.fromkeys(("continue_final_message", "ignore_eos", "store", "echo"), True),
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "parallel_tool_calls": False,
        "top_logprobs": 3,
        "a\r\nX-Injected: 1": 1,
        "\u00fc": 1,
    },
    "responses": {
        **dict.fromkeys(("temperature", "top_p", "top_logprobs", "max_tool_calls"), 1),
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "store": True,
        "service_tier": "flex",
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "prompt_cache_key": "x",
        "stop": ["x"],
    },
    "messages": {
        **dict.fromkeys(("temperature", "top_p", "top_k"), 1),
        "metadata": {"user_id": "x"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "service_tier": "auto",
        "container": "x",
        "mcp_servers": [{"a": 1}],
        "context_management": {"a": 1},
        "output_config": {"a": 1},
    },
}

PARTS = {
    "chat/completions": ({"stream_options": {"include_usage": True, "include_obfuscation": False}},),
    "responses": (
        {"reasoning": {"effort": "low", "summary": None}},
        {"text": {"verbosity": "low", "format": {"a": 1}}},
    ),
    "messages": ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},),
}
PART_NAMES = {
    "chat/completions": ["stream_options.include_obfuscation"],
    "responses": ["text.verbosity", "text.format", "reasoning.effort"],
    "messages": ["tool_choice.type", "tool_choice.disable_parallel_tool_use"],
}

APPLIED = {
    "chat/completions": {
        "model": "m",
        "max_tokens": 50,
        "stop": ["no"],
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": False,
        "logprobs": False,
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "temperature": None,
        "functions": [],
        "logit_bias": {},
        "store": False,
    },
    "responses": {
        "model": "m",
        "max_output_tokens": 50,
        "instructions": "x",
        "metadata": {"a": "b"},
        "include": [],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None},
        "truncation": "disabled",
    },
    "messages": {"model": "m", "system": "x", "stop_sequences": ["no"], "thinking": {"type": "disabled"}},
}


@pytest.mark.parametrize("path", UNAPPLIED)
def test_each_field_is_applied_or_named(tokenizer: Any, path: str) -> None:
    parts = {key: value for each in PARTS[path] for key, value in each.items()}
    bodies = [{**PATHS[path], **UNAPPLIED[path]}, {**PATHS[path], **parts}, {**PATHS[path], **APPLIED[path]}]
    send(tokenizer, *bodies, path=path)
    unapplied, named, applied = answers
    assert unapplied.json()["overruled_options"] == list(UNAPPLIED[path])
    header = unapplied.headers["x-overruled-options"]
    assert all(name in header for name in UNAPPLIED[path] if name.isascii() and "\n" not in name)
    assert "x-injected" not in unapplied.headers
    assert named.json()["overruled_options"] == PART_NAMES[path]
    assert applied.json()["overruled_options"] == []
    assert "x-overruled-options" not in applied.headers


def test_arguments_of_calls_may_be_objects(tokenizer: Any) -> None:
    """Some clients send them so; text arguments that are no object stay text."""
    for arguments in ({"a": 1}, '{"a": 1}', "[" * 3000, '{"a": ' + "9" * 5000 + "}", r'{"a": "\ud800"}'):
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        body = {"messages": [*ASKED, said, {"role": "tool", "tool_call_id": "c", "content": "there"}]}
        _, _, trajectories = send(tokenizer, body)
        assert answers[0].status_code == 200
        assert len(texts(tokenizer, trajectories)) == 1


def test_definitions_of_tools_are_checked(tokenizer: Any) -> None:
    function = TOOL["function"]
    for wrong, part in (
        ({"description": 5}, "description"),
        ({"parameters": "x"}, "parameters"),
        ({"name": 5}, "name"),
    ):
        send(tokenizer, chat("is it?", tools=[{"type": "function", "function": {**function, **wrong}}]))
        assert part in check_error(answers[0], 400)
