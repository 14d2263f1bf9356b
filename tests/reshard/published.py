"""Scenarios of published models, from their config.json content alone."""

from functools import partial

from benchmarks.reshard.published import QWEN3_8B
from benchmarks.reshard.synthetic import engine_layouts
from megarl.megatron.families.load_architecture import load_architecture
from megarl.offline.reshard_explain import make_scenario

BUCKET_BYTES = 1 << 28
"""Default of `weight_sync.bucket_bytes`."""


def qwen3_8b_scenario(train, gen, nodes=1):
    """Return the scenario of Qwen3-8B in bfloat16 with the default bucket."""
    model = load_architecture(QWEN3_8B, origin="test")
    engine = partial(engine_layouts, model)
    return make_scenario(
        "Qwen3-8B", model, "bfloat16", train=train, gen=gen, nodes=nodes, bucket_bytes=BUCKET_BYTES, engine=engine
    )
