"""Conversion of megatron-core's parameter names, which number layers and experts per rank, to global numbers."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+|(?<=mlp\.experts\.linear_fc[12]\.weight)\d+")


def global_name(name: str, layers: range, first_expert: int) -> str:
    """Return `name` with global layer and expert numbers instead of those of the rank.

    Args:
        name: megatron-core's parameter name in the model chunk.
        layers: global numbers of the chunk's layers.
        first_expert: global number of the rank's first routed expert.
    """
    name = _LAYER.sub(lambda found: str(layers[int(found[0])]), name)
    return _EXPERT.sub(lambda found: str(first_expert + int(found[0])), name)
