"""Layouts of an engine's pipeline stages, split from the layout of an engine with a single stage."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from megarl.errors import ConfigError
from megarl.reshard.layout.layout import PieceTable, WeightLayout

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def split_stages(layout: WeightLayout, pp: int) -> list[WeightLayout]:
    """Return the layout of each pipeline stage: layers split evenly, embedding first, final norm and head last.

    If the head is tied to the embedding, the first and the last stage hold it, as in SGLang.

    Raises:
        ConfigError: the number of layers is not a multiple of `pp`.
    """
    if pp == 1:
        return [layout]
    table = layout.pieces
    layer = np.array([_layer(name) for name in table.tensors], np.int64)[table.tensor]
    layers = 1 + int(layer.max(initial=-1))
    if layers % pp:
        raise ConfigError(f"--gen pp needs to divide the layers, got {layers} % {pp} = {layers % pp}")
    embeds = np.array([name == EMBEDDING for name in table.tensors], bool)[table.tensor]
    stage = np.where(layer >= 0, layer * pp // max(layers, 1), np.where(embeds, 0, pp - 1))
    stages = [table.take(np.flatnonzero(stage == number)) for number in range(pp)]
    if HEAD not in layout.tensors:
        stages[-1] = PieceTable.join([stages[-1], _under(HEAD, table.take(np.flatnonzero(embeds)))])
    return [WeightLayout(layout.tensors, of_stage) for of_stage in stages]


def _under(name: str, table: PieceTable) -> PieceTable:
    """Return the same pieces as parts of a local tensor `name`."""
    return PieceTable(table.tensors, [name], replace(table.columns, local=np.zeros_like(table.local)))


def _layer(tensor: str) -> int:
    found = _LAYER.search(tensor)
    return int(found[1]) if found else -1
