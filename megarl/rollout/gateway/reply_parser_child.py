"""The child process of `SglangParser`: reads replies with the names of their parsers, and answers each with a line."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from typing import IO, Any


def main() -> None:
    """Answer lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints must not be taken for an answer
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    logging.disable(logging.WARNING)  # a reply that is no valid call is nothing to warn about
    read_tools = TypeAdapter(list[Tool]).validate_python

    def parse(text: str, tools: list[Any], tool_parser: str | None, reasoning_parser: str | None) -> dict[str, Any]:
        reasoning, calls = "", []
        if reasoning_parser:
            reasoning, text = ReasoningParser(reasoning_parser).parse_non_stream(text)
        if tool_parser and tools:
            content, found = FunctionCallParser(read_tools(tools), tool_parser).parse_non_stream(text or "")
            calls = [(call.name, call.parameters) for call in found]
            text = content if calls else text
        return {"content": text or "", "reasoning": reasoning or "", "calls": calls}

    for line in sys.stdin:
        try:
            answer(answers, parse(**json.loads(line)))
        except Exception as e:  # noqa: BLE001 -- parsers raise anything on what a policy writes
            answer(answers, {"error": traceback.format_exception_only(e)[-1].strip()})


def answer(file: IO[str], value: object) -> None:
    """Write a value as one line of JSON."""
    file.write(json.dumps(value) + "\n")
    file.flush()


if __name__ == "__main__":
    main()
