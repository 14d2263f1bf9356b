"""Solves problems with the OpenAI Agents SDK and a tool."""

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from calculate import compute
from openai import AsyncOpenAI
from serve import serve


@function_tool
def calculate(expression: str) -> str:
    """Compute an expression, such as 12*34-5."""
    return compute(expression)


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run an agent on the last message."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(name="solver", tools=[calculate], model=OpenAIResponsesModel("policy", client))
        await Runner.run(agent, task["messages"][-1]["content"])


set_tracing_disabled(True)
serve(solve)
