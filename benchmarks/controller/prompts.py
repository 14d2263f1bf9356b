"""Measures the memory of loaded prompts, in a process of its own: python -m benchmarks.controller.prompts 10000."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.controller.measure import anonymous_bytes
from megarl.batch.trajectory import Prompt
from megarl.config.data import DataConfig
from megarl.data.prompts import BATCH_ROWS, load_prompts
from megarl.data.tiny_checkpoint import train_tokenizer

PROMPT_TOKENS = 500


def prompt_bytes(count: int) -> float:
    """Return the growth of anonymous memory per prompt of `PROMPT_TOKENS` tokens, in a process that loads `count`."""
    command = [sys.executable, "-m", "benchmarks.controller.prompts", str(count)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _measure(count: int) -> float:
    rng = np.random.default_rng(0)
    words = ["".join(letters) for letters in rng.choice(list("abcdefghij"), (2000, 4))]
    tokenizer = train_tokenizer([" ".join(words)], 4000, 1024)
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few.jsonl", Path(folder) / "many.jsonl"
        for path, num in ((few, 8 * BATCH_ROWS), (many, count)):  # buffers of the tokenizer grow with the first
            rows = (" ".join(rng.choice(words, PROMPT_TOKENS // 2)) for _ in range(num))
            path.write_text("".join(json.dumps({"prompt": row, "answer": "1"}) + "\n" for row in rows))
        config = DataConfig(path=str(many))

        def load(path: Path) -> Sequence[Prompt]:
            return load_prompts(
                config.resolved_sources[0], tokenizer, path=str(path), max_prompt_tokens=10 * PROMPT_TOKENS
            )

        load(few)
        gc.collect()
        before = anonymous_bytes()
        prompts = load(many)
        gc.collect()
        growth = anonymous_bytes() - before
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts[:100]) / len(prompts[:100])
        return growth / len(prompts) * PROMPT_TOKENS / num_tokens


if __name__ == "__main__":
    print(_measure(int(sys.argv[1])))
