"""Solves a product with a graph of LangGraph: `/v1/chat/completions`; streamed for every other seed."""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculate(expression: str) -> str:
    """Compute an expression, such as 12*34-5."""
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "error: write two numbers and *"


task = json.load(sys.stdin)
model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], streaming=task["seed"] % 2 == 1, temperature=0.2)
with_tools = model.bind_tools([calculate])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [with_tools.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([calculate]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
result = graph.compile().invoke({"messages": task["messages"]})
print(result["messages"][-1].content)
