"""Solves problems with the tool-calling agent of smolagents, and a system prompt that a tiny model has room for."""

import asyncio
from typing import Any

from calculate import compute
from serve import serve
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def calculate(expression: str) -> str:
    """Compute an expression, such as 12*34-5.

    Args:
        expression: the expression
    """
    return compute(expression)


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run an agent on the last message, in a thread."""
    model = OpenAIModel("policy", base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[calculate], model=model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Use the tool."
    await asyncio.to_thread(agent.run, task["messages"][-1]["content"])


serve(solve)
