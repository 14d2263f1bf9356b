"""Solves a product with the tool-calling agent of smolagents: `/v1/chat/completions` with forced tools."""

import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def calculate(expression: str) -> str:
    """Compute an expression, such as 12*34-5.

    Args:
        expression: the expression
    """
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "error: write two numbers and *"


task = json.load(sys.stdin)
model = OpenAIModel(os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[calculate], model=model, max_steps=4, verbosity_level=0)
print(agent.run(task["messages"][-1]["content"]))
