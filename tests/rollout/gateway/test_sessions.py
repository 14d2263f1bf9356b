"""Requests of a session: options that do not apply, limits, stop texts, forks, and calls through `/v1/responses`."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from megarl.batch.trajectory import Trajectory
from megarl.data.conversations import read_messages
from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway.reply_parser import ParsedReply, PlainTextParser, SglangParser, ToolCall
from tests.rollout.environments.chat_templates import APPEND, chat_tokenizer
from tests.rollout.gateway.clients import make_client
from tests.rollout.gateway.scripted import SeededEngine, logged_ids, make_agent, make_prompt, run_groups, sampled_ids

QUESTION = {"role": "user", "content": "is it?"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

answers: list[httpx.Response] = []


async def post_all(task: Task, base_url: str, api_key: str, *, path: str, bodies: list[Any]) -> float:
    """Send the bodies one after the other, lists of them at the same time, and keep the responses."""
    answers.clear()
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        for each in bodies:
            together = each if isinstance(each, list) else [each]
            answers.extend(await asyncio.gather(*(client.post(f"{base_url}/{path}", json=body) for body in together)))
    return 1.0


def send(tokenizer: Any, *bodies: Any, path: str = "chat/completions", reply: Any = None, **config: Any) -> Any:
    """Return engine, summary and trajectories of an episode that sends the bodies; the responses are in `answers`."""
    engine = SeededEngine(tokenizer, reply=reply or (lambda prompt: "yes"))
    most = config.pop("max_new_tokens", 1000)
    agent = make_agent(tokenizer, post_all, kwargs={"path": path, "bodies": list(bodies)}, **config)
    ((summary, trajectories),) = run_groups(engine, agent, [make_prompt(tokenizer)], max_new_tokens=most)
    return engine, summary, trajectories


def chat(*contents: str, **options: Any) -> dict[str, Any]:
    """Return a request with messages of user and policy in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)], **options}


def texts(tokenizer: Any, trajectories: list[Trajectory]) -> list[str]:
    return [tokenizer.decode(each.token_ids) for each in trajectories]


def test_sampling_is_that_of_the_run_and_clients_learn_it(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = {"temperature": 0.1, "top_p": 0.5, "seed": 3, "logit_bias": {"5": 9}, "presence_penalty": 1}
    required = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    engine, _, _ = send(tokenizer, chat("is it?", **options, **required), chat("why?", **options, **required))
    assert [request.sampling.temperature for request, _ in engine.log] == [1.0, 1.0]
    assert engine.log[0][0].sampling.seed not in (3, None)
    names = "temperature, top_p, seed, logit_bias, presence_penalty, response_format, tool_choice"
    assert [answer.headers["x-overruled-options"] for answer in answers] == [names, names]
    assert answers[0].json()["overruled_options"] == names.split(", ")
    assert [record.getMessage() for record in caplog.records] == [
        f"the harness sets {names}, which do not apply: sampling is that of the run"
    ]
    send(tokenizer, chat("is it?", tool_choice="auto", n=1))
    assert "x-overruled-options" not in answers[0].headers


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat("is it?", n=2), "n needs to be 1, got 2: send a request for each"),
        (chat("is it?", tools=[TOOL]), "tools need rollout.harness.tool_parser, which is not set"),
        (chat("is it?", tools=[{"type": "web_search"}]), "tools need to be of the type function, got 'web_search'"),
        (chat("is it?", max_tokens=0), "max_tokens needs to be an integer of at least 1, got 0"),
        (chat("is it?", stop=[""]), "stop needs to be a text or a list of texts, got ['']"),
        ({"messages": []}, "messages needs to be a list of messages, got []"),
        ({"messages": [{"content": "is it?"}]}, "a message needs a role, got {'content': 'is it?'}"),
        ({"messages": [IMAGE]}, "content needs parts of text, got one of type 'image_url'"),
        ([[]], "the body needs to be a JSON object, got list"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(tokenizer: Any, body: Any, message: str) -> None:
    _, summary, trajectories = send(tokenizer, body, chat("is it?"))
    assert (answers[0].status_code, answers[0].json()["error"]["message"]) == (400, message)
    assert answers[1].status_code == 200  # the episode goes on
    assert summary.trajectories[0].num_turns == len(trajectories) == 1


def test_only_the_key_of_a_running_session_is_served(tokenizer: Any) -> None:
    agent = make_agent(tokenizer, ask_with_other_keys)
    run_groups(SeededEngine(tokenizer), agent, [make_prompt(tokenizer)])
    assert [answer.status_code for answer in answers] == [401, 401, 200, 200, 404]
    assert [model["id"] for model in answers[3].json()["data"]] == ["policy"]


async def ask_with_other_keys(task: Task, base_url: str, api_key: str) -> None:
    answers.clear()
    root = base_url.partition("/s/")[0]
    assert root.startswith("http://127.0.0.1:")
    url = f"{root}/v1/chat/completions"
    key = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        answers.append(await client.post(url, json=chat("is it?")))
        answers.append(await client.post(f"{root}/s/{api_key}x/v1/chat/completions", json=chat("is it?"), headers=key))
        answers.append(await client.post(url, json=chat("is it?"), headers=key))
        answers.extend([await client.get(f"{base_url}/{path}") for path in ("models", "embeddings")])


@pytest.mark.parametrize(
    ("config", "reason", "num_turns", "code"),
    [
        ({"max_turns": 2}, "turns", 2, "turns"),
        ({"max_seconds": 1e-9}, "seconds", 0, "seconds"),
        ({"max_new_tokens": 14}, "length", 1, "context_length_exceeded"),
        ({"max_new_tokens": 2}, "length", 1, "context_length_exceeded"),
        ({"max_turn_tokens": 2}, "stop", 3, None),
    ],
)
def test_the_first_limit_names_the_ending(tokenizer, config, reason, num_turns, code) -> None:
    first = chat("is it?")
    said = tokenizer.decode(tokenizer.encode("yes")[:2]) if "max_turn_tokens" in config else "yes"
    second, third = chat("is it?", said, "why?"), chat("is it?", said, "why?", said, "why?")
    engine, summary, trajectories = send(tokenizer, first, second, third, **config)
    assert (summary.trajectories[0].finish_reason, len(engine.log)) == (reason, num_turns)
    assert len(trajectories) == 1
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 400]
    assert refused == [code] * (3 - num_turns)
    assert sampled_ids(trajectories) == logged_ids(engine)


def test_a_stop_text_ends_the_reply_and_what_is_trained(tokenizer: Any) -> None:
    engine, _, trajectories = send(
        tokenizer,
        chat("is it?", stop=["tool", "Observation:"]),
        chat("is it?", "higher ", "why?", stop="tool"),
        reply=lambda prompt: "higher tool lower",
    )
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["higher ", "higher "]
    assert answers[0].json()["choices"][0]["finish_reason"] == "stop"
    turn = "<|assistant|>\nhigher tool"
    assert texts(tokenizer, trajectories) == [f"<|user|>\nis it?<eos>\n{turn}<eos>\n<|user|>\nwhy?<eos>\n{turn}"]
    assert [len(ids) for ids in sampled_ids(trajectories)] < [len(ids) for ids in logged_ids(engine)]
    for ids, whole in zip(sampled_ids(trajectories), logged_ids(engine), strict=True):
        assert whole[: len(ids)] == ids


class Marked:
    """Takes what follows a special token as a call, and keeps the texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def parse(self, text: str, tools: Any) -> ParsedReply:
        self.texts.append(text)
        _, mark, call = text.partition("[TOOL_CALLS]")
        return ParsedReply("", "", (ToolCall("look", call),)) if mark else ParsedReply(text)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("stop", [(), ("STOP",), ("absent", "STOPmo", "STOP")])
def test_the_parser_gets_special_tokens_also_before_a_stop_text(stop: tuple[str, ...]) -> None:
    tokenizer = chat_tokenizer(APPEND)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[/SEE]"]})
    parser, sampled = Marked(), '[/SEE][TOOL_CALLS]{"at": 1}STOPmore[/SEE]STOP'
    send(tokenizer, chat("is it?", tools=[TOOL], stop=list(stop)), reply=lambda prompt: sampled, parser=parser)
    assert parser.texts == ['[/SEE][TOOL_CALLS]{"at": 1}' if stop else sampled]
    (call,) = answers[0].json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"


def test_parallel_turns_share_the_tokens_of_the_episode(tokenizer: Any) -> None:
    bodies = [chat(f"question {number}") for number in range(12)]
    for config in ({}, {"max_turn_tokens": 7}):
        engine, summary, trajectories = send(
            tokenizer, bodies, reply=lambda prompt: "yes higher " * 4, max_new_tokens=60, **config
        )
        sampled = sum(len(generation.token_ids) for _, generation in engine.log)
        assert 50 <= sampled <= 60
        assert sum(a.json()["usage"]["completion_tokens"] for a in answers if a.status_code == 200) == sampled
        refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
        assert set(refused) == {"context_length_exceeded"}
        assert len(refused) + len(engine.log) == 12
        assert summary.trajectories[0].finish_reason == "length"
        assert sampled_ids(trajectories) == logged_ids(engine)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_program_may_continue_after_a_request_that_is_too_long(tokenizer: Any, path: str) -> None:
    def ask(text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"input": messages} if path == "responses" else {"messages": messages, "max_tokens": 20}

    bodies = [ask("is it?"), ask("long " * 100), ask("why?"), ask("longer " * 100)]
    engine, summary, trajectories = send(tokenizer, *bodies[:3], path=path, max_new_tokens=100)
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    error = answers[1].json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "leaves no room for a reply" in error["message"]
    assert error["message"].startswith("prompt is too long: ") == (path == "messages")
    assert len(engine.log) == len(trajectories) == 2
    assert summary.trajectories[0].finish_reason == "stop"
    _, summary, trajectories = send(tokenizer, *bodies, path=path, max_new_tokens=100)
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400]
    assert summary.trajectories[0].finish_reason == "length"
    assert len(trajectories) == 2


def test_parallel_and_rewritten_conversations_are_segments_and_nothing_is_trained_twice(tokenizer: Any) -> None:
    engine, summary, trajectories = send(
        tokenizer,
        chat("is it?"),
        [chat("is it?", "yes", "why?"), chat("is it?", "yes", "lower?")],  # from the same turn
        chat("is it?", "no", "why?"),  # another reply than that of the policy
        chat("is it?", " yes\n", "higher?"),  # white space around a reply is not compared
    )
    assert len(engine.log) == 5
    assert summary.trajectories[0].num_segments == len(trajectories) == 4
    assert sampled_ids(trajectories) == logged_ids(engine)
    assert texts(tokenizer, trajectories)[-1].endswith("higher?<eos>\n<|assistant|>\nyes<eos>")
    assert [each.segment for each in trajectories] == [0, 1, 2, 3]
    rewritten = "<|user|>\nis it?<eos>\n<|assistant|>\nno<eos>\n<|user|>\nwhy?<eos>\n<|assistant|>\nyes<eos>"
    assert rewritten in texts(tokenizer, trajectories)
    _, _, forbidden = send(tokenizer, chat("is it?"), chat("why?"), forks="forbid")
    assert "rollout.harness.forks: forbid does not allow" in answers[1].json()["error"]["message"]
    assert len(forbidden) == 1


def test_the_reward_of_the_harness_is_that_of_the_last_turn(tokenizer: Any) -> None:
    _, _, trajectories = send(tokenizer, chat("is it?"), chat("is it?", "yes", "why?"), chat("lower?"))
    assert [each.turn_rewards for each in trajectories] == [(), (1.0,)]
    assert [each.rewards for each in trajectories] == [{"game": 1.0}] * 2


def test_log_probabilities_are_returned_as_the_engine_sampled_them(tokenizer: Any) -> None:
    engine, _, _ = send(tokenizer, chat("is it?", logprobs=True))
    found = answers[0].json()["choices"][0]["logprobs"]["content"]
    generation = engine.log[0][1]
    assert [entry["token_id"] for entry in found] == generation.token_ids.tolist()
    assert [entry["logprob"] for entry in found] == generation.logprobs.tolist()
    assert answers[0].json()["usage"]["completion_tokens"] == len(generation.token_ids)


async def call_through_responses(task: Task, base_url: str, api_key: str) -> None:
    """Answer a call and send back the items of the response, as the Agents SDK does."""
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}
    items: list[Any] = [QUESTION]
    async with make_client(base_url, api_key) as client:
        for turn in range(3):
            options: Any = {"model": "m", "input": items, "tools": [tool], "instructions": "be brief", "temperature": 0}
            if task.prompt.row["stream"]:
                async for event in await client.responses.create(**options, stream=True):
                    if event.type == "response.completed":
                        response = event.response
            else:
                response = await client.responses.create(**options)
            items += [item.model_dump(exclude_unset=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            assert len(calls) == (0 if turn == 2 else 1), response.output_text
            for call in calls:
                assert json.loads(call.arguments) == {"at": turn}
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"why {turn}"})


def test_calls_and_thoughts_are_found_by_sglang(tokenizer: Any) -> None:
    def reply(prompt: str) -> str:
        turn = prompt.count("why")
        call = f'<tool_call>\n{{"arguments": {{"at": {turn}}},   "name": "look"}}\n</tool_call>'
        unknown = call.replace("look", "listen")
        return f"<think>hm</think>{unknown if turn == 2 else 'Let me look. ' + call}"

    engine = SeededEngine(tokenizer, reply=reply)
    parser = SglangParser(tool_parser="qwen25", reasoning_parser="qwen3")
    agent = make_agent(tokenizer, call_through_responses, parser=parser)
    groups = run_groups(engine, agent, [make_prompt(tokenizer, n, stream=n > 0) for n in range(2)])
    for summary, trajectories in groups:
        assert summary.trajectories[0].num_turns == 3
        (text,) = texts(tokenizer, trajectories)
        start = "<|system|>\nbe brief<eos>\n<|user|>\nis it?<eos>\n<|assistant|>\n<think>hm</think>Let me"
        assert text.startswith(start)
        assert text.count("<think>") == 3
    assert sampled_ids([each for _, group in groups for each in group]) == logged_ids(engine)


def test_tool_definitions_are_part_of_the_prompt() -> None:
    tokenizer = chat_tokenizer("{% if tools %}<|tools|>\n{{ tools | tojson }}<eos>\n{% endif %}" + APPEND)
    bodies = [chat("is it?", tools=[TOOL]), chat("is it?", tools=[TOOL], tool_choice="none")]
    _, _, trajectories = send(tokenizer, *bodies, parser=PlainTextParser())
    first, second = texts(tokenizer, trajectories)
    assert first.startswith("<|tools|>\n[" + json.dumps(TOOL))
    assert second.startswith("<|user|>")


async def ask_with_tools_of_the_row(task: Task, base_url: str, api_key: str) -> float:
    answers.clear()
    body = {"messages": list(task.messages), "tools": list(task.tools)}
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        answers.append(await client.post(f"{base_url}/chat/completions", json=body))
    return 1.0


def test_a_program_gets_the_tools_of_the_row() -> None:
    tokenizer = chat_tokenizer("{% if tools %}<|tools|>\n{{ tools | tojson }}<eos>\n{% endif %}" + APPEND)
    agent = make_agent(tokenizer, ask_with_tools_of_the_row, parser=PlainTextParser())
    engine = SeededEngine(tokenizer, reply=lambda prompt: "yes")
    prompts = [make_prompt(tokenizer, tools=json.dumps([TOOL])), make_prompt(tokenizer, 2)]
    groups = run_groups(engine, agent, prompts, max_new_tokens=1000)
    (first,), (second,) = (texts(tokenizer, trajectories) for _, trajectories in groups)
    assert first.startswith("<|tools|>\n[" + json.dumps(TOOL))
    assert second.startswith("<|user|>")


def request(path: str, content: Any, **options: Any) -> dict[str, Any]:
    """Return a request of the API `path` with one message of the user."""
    name = "input" if path == "responses" else "messages"
    return {name: [{"role": "user", "content": content}], **options}


PATHS = ("chat/completions", "responses", "messages")


@pytest.mark.parametrize("path", PATHS)
def test_variables_of_requests_replace_those_of_the_run(path: str) -> None:
    tokenizer = chat_tokenizer("{{ effort | default('none') }}/{{ style | default('none') }}\n" + APPEND)
    bodies = [request(path, "is it?"), request(path, "is it?", chat_template_kwargs={"effort": "high"})]
    data = {"chat_template_kwargs": {"effort": "low", "style": "brief"}}
    _, _, trajectories = send(tokenizer, *bodies, path=path, parser=PlainTextParser(), data=data)
    assert [text.partition("\n")[0] for text in texts(tokenizer, trajectories)] == ["low/brief", "high/brief"]
    assert "x-overruled-options" not in answers[1].headers


@pytest.mark.parametrize("path", PATHS)
def test_contents_are_read_as_those_of_data_files(path: str) -> None:
    part = {"type": "input_text" if path == "responses" else "text"}
    contents: list[Any] = [None, "", [], [{**part, "text": "is "}, {**part, "text": "it?"}]]
    bodies = [request(path, content) for content in contents]
    tokenizer = chat_tokenizer(APPEND)
    engine, _, _ = send(tokenizer, *bodies, path=path, parser=PlainTextParser())
    assert [answer.status_code for answer in answers] == [200] * 4
    prompts = [tokenizer.decode(sent.token_ids) for sent, _ in engine.log]
    found = [text.removeprefix("<|user|>\n").partition("<eos>")[0] for text in prompts]
    read = [read_messages([{"role": "user", "content": content}])[0]["content"] for content in contents]
    assert (found, read) == (["", "is it?"], ["", "", "", "is it?"])  # equal requests get the same reply


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "strftime_now"])
def test_variables_that_requests_must_not_set_are_refused(tokenizer: Any, name: str, path: str) -> None:
    send(tokenizer, request(path, "is it?", chat_template_kwargs={name: True}), request(path, "is it?"), path=path)
    assert [answer.status_code for answer in answers] == [400, 200]
    assert name in answers[0].json()["error"]["message"]


def test_messages_that_end_with_the_assistant_are_refused(tokenizer: Any) -> None:
    send(tokenizer, chat("is it?", "yes"), chat("is it?"))
    assert [answer.status_code for answer in answers] == [400, 200]
    assert "end with one of the assistant" in answers[0].json()["error"]["message"]
