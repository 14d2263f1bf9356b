"""Solves a product with Anthropic's SDK: `/v1/messages`; streamed for every other seed."""

import json
import os
import sys

from anthropic import Anthropic, BadRequestError

TOOL = {
    "name": "calculate",
    "description": "Compute an expression, such as 12*34-5.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


def calculate(expression: str) -> str:
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "error: write two numbers and *"


task = json.load(sys.stdin)
client = Anthropic()
messages = [{"role": "user", "content": task["messages"][-1]["content"]}]
options = {
    "model": os.environ["OPENAI_MODEL"],
    "max_tokens": 1000,
    "system": [{"type": "text", "text": "Use the tool."}],
    "tools": [TOOL],
    "stop_sequences": ["Observation:"],
}
try:
    client.messages.create(**{**options, "messages": [{"role": "nobody", "content": "?"}]})
    raise SystemExit("a wrong role is no error")
except BadRequestError as error:
    if error.body["error"]["type"] != "invalid_request_error":
        raise
while True:
    if task["seed"] % 2:
        with client.messages.stream(**options, messages=messages) as stream:
            texts = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert texts == "".join(block.text for block in message.content if block.type == "text")
    else:
        counted = client.messages.count_tokens(
            model=options["model"], system=options["system"], tools=options["tools"], messages=messages
        )
        message = client.messages.create(**options, messages=messages)
        if len(messages) == 1:
            assert counted.input_tokens == message.usage.input_tokens, (counted, message.usage)
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn"), message
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": calculate(**call.input)} for call in calls]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in message.content if block.type == "text"))
