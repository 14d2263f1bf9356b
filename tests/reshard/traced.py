"""Traces SGLang's layouts of several engines in one process, because importing SGLang takes seconds.

    python traced.py '[[<model folder>, <device>, <tp>, <ep>, <file for the traces>], ...]'

Run it with the environment of an engine.
"""

import json
import sys
from pathlib import Path

from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.weight_layout.trace_child import trace_ranks
from megarl.rollout.sglang.weight_layout.trace_file import write_traces

DTYPE = "bfloat16"


def trace(folder, device, tp, ep, file):
    spec = EngineSpec(
        model_path=folder,
        device=device,
        tp=tp,
        dtype=DTYPE,
        max_total_tokens=4096,
        extra_args={"ep_size": ep} if ep > 1 else {},
    )
    write_traces(Path(file), trace_ranks(spec))


if __name__ == "__main__":
    for engine in json.loads(sys.argv[1]):
        trace(*engine)
