"""What is trained is what the engine sampled: through any client, chat template, parser and retry."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest

from megarl.engines.engine import Generation, GenerationRequest
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.environments.environment import Message, Task
from megarl.rollout.gateway.reply_parser import ParsedReply, ToolCall
from tests.rollout.environments.chat_templates import DAY, STABLE, STRIPS_THOUGHTS, chat_tokenizer
from tests.rollout.gateway.clients import KINDS, talk
from tests.rollout.gateway.scripted import SeededEngine, logged_ids, make_agent, make_prompt, run_groups, sampled_ids


async def sample_directly(episode: Episode) -> Any:
    """Do what `talk` does, with tokens instead of messages."""
    renderer, row = ChatRenderer(episode.tokenizer, DAY), episode.prompt.row
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(row["turns"]):
        generation = await episode.generate(max_new_tokens=row.get("turn_tokens"))
        if turn + 1 < row["turns"]:
            reply, asked = episode.decode(generation.token_ids), {"role": "user", "content": f"why {turn}?"}
            found = renderer.extension(messages, reply, [asked], int(generation.token_ids[-1]), None)
            assert not found.is_fork
            episode.observe(found.token_ids)
            messages += [{"role": "assistant", "content": reply}, asked]
    return episode.trajectories()


def test_all_clients_sample_as_direct_sampling_with_the_same_seeds(tokenizer: Any) -> None:
    prompts = [make_prompt(tokenizer, number, turns=1 + number % 6) for number in range(6 * len(KINDS))]
    engine = SeededEngine(tokenizer)
    direct = run_groups(engine, sample_directly, prompts)
    outputs = [generation.token_ids[:-1].tolist() for _, generation in engine.log]
    drifting = [ids for ids in outputs if tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids]
    assert len(drifting) >= 0.8 * len(outputs)  # do not survive decoding
    agent = make_agent(tokenizer, talk, kwargs={"kinds": list(KINDS)}, max_programs=16)
    served = run_groups(SeededEngine(tokenizer), agent, prompts)
    assert len(KINDS) == 9  # so that each client has conversations of each length
    for number, ((_, expected), (summary, got)) in enumerate(zip(direct, served, strict=True)):
        assert len(got) == len(expected) == 1
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            assert getattr(got[0], name).tobytes() == getattr(expected[0], name).tobytes()
        assert (got[0].finish_reason, summary.trajectories[0].num_turns) == ("stop", 1 + number % 6)


@pytest.mark.parametrize("name", [*STABLE, "strips thoughts"])
def test_prompts_begin_with_the_prompt_and_output_before(name: str) -> None:
    tokenizer = chat_tokenizer(STABLE.get(name, STRIPS_THOUGHTS))
    is_stable = name in STABLE

    def reply(prompt: str) -> str:
        return "<think>hm</think>yes" if prompt.count("why") % 2 else "no, 7"

    engine = SeededEngine(tokenizer, reply=reply)
    prompts = [make_prompt(tokenizer, number, turns=5) for number in range(8)]
    groups = run_groups(engine, make_agent(tokenizer, talk), prompts)
    for number, (summary, trajectories) in enumerate(groups):
        log = [each for each in engine.log if each[0].request_id.startswith(f"step-1-{number}-")]
        extended = [
            b[0].token_ids[: len(a[0].token_ids) + len(a[1].token_ids)] == (*a[0].token_ids, *a[1].token_ids.tolist())
            for a, b in pairwise(log)
        ]
        thoughts = ["<think>" in tokenizer.decode(generation.token_ids) for _, generation in log[:-1]]
        assert sum(thoughts) == 2
        assert extended == [is_stable or not thought for thought in thoughts]
        assert len(trajectories) == summary.trajectories[0].num_segments == 1 + (0 if is_stable else sum(thoughts))
        num_sampled = sum(len(generation.token_ids) for _, generation in log)
        assert sum(int(each.loss_mask.sum()) for each in trajectories) == num_sampled
        assert sampled_ids(trajectories) == sorted(generation.token_ids.tolist() for _, generation in log)


class Rewriter:
    """Takes `key=value,...` as a call with sorted arguments as JSON, which no reply has ever been."""

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        parts = dict(part.split("=") for part in text.split(","))
        return ParsedReply("", "", (ToolCall("look", json.dumps(dict(sorted(parts.items())))),))

    async def close(self) -> None:
        pass


async def call_tools(task: Task, base_url: str, api_key: str) -> None:
    """Answer the calls of five replies, and send back the messages with other ids, orders of keys and nulls."""
    messages: list[dict[str, Any]] = [dict(message) for message in task.messages]
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": None, "parameters": parameters}}]
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        for turn in range(5):
            body = {"messages": messages, "tools": tools}
            response = await client.post(f"{base_url}/chat/completions", json=body)
            message = response.raise_for_status().json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            shuffled = json.dumps(dict(reversed(arguments.items())), indent=1)
            function = {"arguments": shuffled, "name": call["function"]["name"]}
            calls = [{"function": function, "id": f"other{turn}", "type": "function"}]
            messages += [
                {"tool_calls": calls, "content": None, "refusal": None, "role": "assistant"},
                {"role": "tool", "tool_call_id": f"other{turn}", "content": f"why {turn}"},
            ]


def test_tool_calls_that_the_parser_rewrites_are_trained_as_sampled(tokenizer: Any) -> None:
    engine = SeededEngine(tokenizer, reply=lambda prompt: f"b={prompt.count('why')}, a =1")
    agent = make_agent(tokenizer, call_tools, parser=Rewriter())
    groups = run_groups(engine, agent, [make_prompt(tokenizer, number) for number in range(40)])
    trajectories = [each for _, group in groups for each in group]
    assert len(engine.log) == 200
    assert len(trajectories) == 40  # no fork
    assert sampled_ids(trajectories) == logged_ids(engine)
    text = tokenizer.decode(trajectories[0].token_ids)
    beginning = "<|user|>\nis it?<eos>\n<|assistant|>\nb=0, a =1<eos>\n<|tool|>\nwhy 0<eos>\n<|assistant|>\n"
    assert text.startswith(beginning)
    assert "look" not in text


class SlowEngine(SeededEngine):
    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(0.05)
        return await super().generate(request)


cut_off: Counter[str] = Counter()


async def talk_badly(task: Task, base_url: str, api_key: str) -> None:
    """Cut off 30 % of the turns at random moments, and send them again, up to three times."""
    rng = random.Random(task.seed)
    messages = list(task.messages)
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        for turn in range(task.prompt.row["turns"]):
            body = {"messages": messages}
            while rng.random() < 0.3:
                cut_off["turns"] += 1
                try:
                    await client.post(f"{base_url}/chat/completions", json=body, timeout=rng.uniform(0.005, 0.08))
                except httpx.TimeoutException:
                    cut_off["timeouts"] += 1
            posts = [client.post(f"{base_url}/chat/completions", json=body) for _ in range(2)]
            first, second = await asyncio.gather(*posts)
            assert first.raise_for_status().json() == second.json()
            reply = first.json()["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": f"why {turn}?"}]


def test_a_retry_gets_the_same_answer_and_nothing_is_trained_twice(tokenizer: Any) -> None:
    cut_off.clear()
    engine = SlowEngine(tokenizer)
    prompts = [make_prompt(tokenizer, number, turns=4) for number in range(50)]
    groups = run_groups(engine, make_agent(tokenizer, talk_badly), prompts)
    trajectories = [each for _, group in groups for each in group]
    assert cut_off["timeouts"] > 30
    assert len(engine.log) == 200
    assert len(trajectories) == 50
    assert sampled_ids(trajectories) == logged_ids(engine)
