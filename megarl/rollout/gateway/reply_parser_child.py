"""The child process of `SglangParser`: reads the names of the parsers, then replies, and answers each with a line."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import IO, Any


def main() -> None:
    """Answer lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints must not be taken for an answer
    names = json.loads(sys.stdin.readline())
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    logging.disable(logging.WARNING)  # a reply that is no valid call is nothing to warn about
    read_tools = TypeAdapter(list[Tool]).validate_python

    def parse(text: str, tools: list[Any]) -> dict[str, Any]:
        reasoning, calls = "", []
        if names["reasoning_parser"]:
            reasoning, text = ReasoningParser(names["reasoning_parser"]).parse_non_stream(text)
        if names["tool_parser"] and tools:
            content, found = FunctionCallParser(read_tools(tools), names["tool_parser"]).parse_non_stream(text or "")
            calls = [(call.name, call.parameters) for call in found]
            text = content if calls else text
        return {"content": text or "", "reasoning": reasoning or "", "calls": calls}

    try:
        parse("", [])
    except ValueError as e:  # an unknown name
        answer(answers, {"error": str(e)})
        return
    answer(answers, {})
    for line in sys.stdin:
        try:
            answer(answers, parse(**json.loads(line)))
        except Exception as e:  # noqa: BLE001 -- the parent reports it
            answer(answers, {"error": f"{type(e).__name__}: {e}"})


def answer(file: IO[str], value: object) -> None:
    """Write a line."""
    file.write(json.dumps(value) + "\n")
    file.flush()


if __name__ == "__main__":
    main()
