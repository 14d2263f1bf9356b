"""Solves problems with a graph of LangGraph and a tool."""

from typing import Any

from calculate import compute
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from serve import serve


@tool
def calculate(expression: str) -> str:
    """Compute an expression, such as 12*34-5."""
    return compute(expression)


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run the graph on the messages."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([calculate])

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([calculate]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    await graph.compile().ainvoke({"messages": task["messages"]})


serve(solve)
