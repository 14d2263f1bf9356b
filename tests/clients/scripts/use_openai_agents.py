"""Solves a product with the OpenAI Agents SDK: its default API, `/v1/responses`; streamed for every other seed."""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool


@function_tool
def calculate(expression: str) -> str:
    """Compute an expression, such as 12*34-5."""
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "error: write two numbers and *"


async def main() -> None:
    task = json.load(sys.stdin)
    agent = Agent(name="solver", instructions="Use the tool.", tools=[calculate], model=os.environ["OPENAI_MODEL"])
    question = task["messages"][-1]["content"]
    if task["seed"] % 2:
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question)
    print(result.final_output)


asyncio.run(main())
