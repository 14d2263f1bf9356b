"""The pipeline stages of an engine, cut from the layout of an engine that has one."""

from __future__ import annotations

import re
from dataclasses import replace

from megarl.errors import ConfigError
from megarl.reshard.layout import Piece, WeightLayout

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def split_stages(layout: WeightLayout, pp: int) -> list[WeightLayout]:
    """By pipeline stage: layers split evenly, the embedding on the first, final norm and head on the last.

    A head that is tied to the embedding lies on both, as it does in SGLang.

    Raises:
        ConfigError: the layers do not divide.
    """
    layers = 1 + max((number for p in layout.pieces if (number := _layer(p)) is not None), default=-1)
    if layers % pp:
        raise ConfigError(f"--gen pp needs to divide the layers, got {layers} % {pp} = {layers % pp}")
    stages: list[list[Piece]] = [[] for _ in range(pp)]
    tied = HEAD not in layout.tensors
    for piece in layout.pieces:
        number = _layer(piece)
        if number is not None:
            stages[number * pp // layers].append(piece)
        elif piece.tensor != EMBEDDING:
            stages[-1].append(piece)
        else:
            stages[0].append(piece)
            if tied and pp > 1:
                stages[-1].append(replace(piece, local=HEAD))
    return [WeightLayout(layout.tensors, tuple(pieces)) for pieces in stages]


def _layer(piece: Piece) -> int | None:
    found = _LAYER.search(piece.tensor)
    return int(found[1]) if found else None
