"""Runs the scripts in the environments of FOLDER and compares what is trained with the engine's log.

python -m tests.clients FOLDER [--episodes N]
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.batch.trajectory import Trajectory
from megarl.engines.engine import Generation, GenerationRequest
from tests.rollout.environments.chat_templates import APPEND, chat_tokenizer
from tests.rollout.gateway.scripted import SeededEngine, make_agent, make_prompt, run_groups
from tests.time_limits import UNREACHED_SECONDS

SCRIPTS = Path(__file__).parent / "scripts"
FRAMEWORKS = ("openai-agents", "langgraph", "smolagents", "anthropic")
TEMPLATE = "{% if tools %}<|tools|>\n{{ tools | tojson }}<eos>\n{% endif %}" + APPEND


def main() -> int:
    """Print a table; 1 if any trained token is not that of the engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has an environment for each framework")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    logging.getLogger("megarl").setLevel(logging.ERROR)
    results = [run(name, args.folder / name / "bin/python", args.episodes) for name in FRAMEWORKS]
    if args.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    else:
        for row in results:
            sys.stdout.write("  ".join(f"{key}: {value}" for key, value in row.items()) + "\n")
    return int(any(row["turns as sampled"] != row["turns"] or row["failed"] for row in results))


def run(name: str, python: Path, num_episodes: int) -> dict[str, Any]:
    """Return the counts of a framework's episodes."""
    tokenizer = chat_tokenizer(TEMPLATE)
    engine = SeededEngine(tokenizer, reply=reply, in_letters=True)
    agent = make_agent(
        tokenizer,
        command=[str(python), str(SCRIPTS / f"use_{name.replace('-', '_')}.py")],
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        tool_parser="qwen25",
        max_programs=2,
        max_seconds=UNREACHED_SECONDS,
    )
    prompts = [make_prompt(tokenizer, number, f"{number + 11}*{number + 37}?") for number in range(num_episodes)]
    groups = run_groups(engine, agent, prompts, max_new_tokens=60_000)
    segments = [trajectory for _, group in groups for trajectory in group]
    encoded_alike = 0
    for _, generation in engine.log:
        ids = generation.token_ids.tolist()
        encoded_alike += tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    return {
        "framework": name,
        "episodes": num_episodes,
        "turns": len(engine.log),
        "turns as sampled": sum(_is_trained(request, generation, segments) for request, generation in engine.log),
        "sampled tokens": sum(len(generation.token_ids) for _, generation in engine.log),
        "trained tokens": sum(int(each.loss_mask.sum()) for each in segments),
        "turns that text is encoded to": encoded_alike,
        "segments": len(segments),
        "failed": sum(bool(each.reward_errors) for each in segments),
        "errors": sorted({error for each in segments for error in each.reward_errors.values()}),
    }


def reply(prompt: str) -> str:
    """Call the tool with the question, with odd spaces, and answer with its result."""
    left, right = map(int, re.findall(r"(\d+)\*(\d+)\?", prompt)[-1])
    if prompt.count("<|assistant|>") == 1:
        return _call("calculate", f'{{ "expression" :"{left}*{right}"}}')
    if '"final_answer"' in prompt:
        return _call("final_answer", f'{{"answer":"{left * right}" }}')
    return f"#### {left * right}"


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"arguments": {arguments},"name":   "{name}"}}\n</tool_call>'


def _is_trained(request: GenerationRequest, generation: Generation, segments: Sequence[Trajectory]) -> bool:
    """Whether a segment has the prompt of a turn, and after it its tokens, masked as sampled."""
    start = len(request.token_ids)
    end = start + len(generation.token_ids)
    return any(
        tuple(each.token_ids[:start].tolist()) == request.token_ids
        and np.array_equal(each.token_ids[start:end], generation.token_ids)
        and np.array_equal(each.logprobs[start:end], generation.logprobs)
        and bool(each.loss_mask[start:end].all())
        for each in segments
    )


if __name__ == "__main__":
    sys.exit(main())
