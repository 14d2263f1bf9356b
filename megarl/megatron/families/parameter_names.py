"""Names of a rank's parameters, whose layers and experts megatron-core numbers from 0 on every rank."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+|(?<=mlp\.experts\.linear_fc[12]\.weight)\d+")


def global_name(name: str, layers: range, first_expert: int) -> str:
    """megatron-core's `name` in a chunk that holds `layers`, with layers and experts numbered over all ranks.

    Args:
        first_expert: number of the rank's first routed expert.
    """
    name = _LAYER.sub(lambda found: str(layers[int(found[0])]), name)
    return _EXPERT.sub(lambda found: str(first_expert + int(found[0])), name)
