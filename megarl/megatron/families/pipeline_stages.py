"""Distribution of layers over pipeline stages, as in megatron-core.

8 layers, 2 stages                   stage 0: 0 1 2 3        stage 1: 4 5 6 7
the same, 2 model chunks per stage   stage 0: 0 1 | 4 5      stage 1: 2 3 | 6 7
7 layers, 3 stages, 2 in the last    not possible: 5 % 2 = 1
7 layers, 3 stages, 3 in the first   stage 0: 0 1 2          stage 1: 3 4      stage 2: 5 6
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """Options of the distribution of layers over pipeline stages; the default is an even split."""

    num_chunks: int = 1
    """Number of model chunks per stage in the interleaved schedule (virtual pipeline size)."""
    first: int | None = None
    """Number of layers in the first stage (`num_layers_in_first_pipeline_stage`); None: as in the middle stages."""
    last: int | None = None
    """Number of layers in the last stage (`num_layers_in_last_pipeline_stage`); None: as in the middle stages."""


EVEN = PipelineSplit()


def stage_layers(num_layers: int, pp: int, split: PipelineSplit = EVEN) -> list[list[range]]:
    """Return the layer numbers of each model chunk, indexed [stage][chunk].

    Raises:
        ConfigError: the layers cannot be divided into stages and chunks of equal size.
    """
    counts = _layers_of_stages(num_layers, pp, split)
    if split.num_chunks > 1 and pp == 1:
        raise ConfigError(f"vpp needs pp > 1, got vpp {split.num_chunks} with pp 1")
    for stage, count in enumerate(counts):
        if count % split.num_chunks:
            raise ConfigError(
                f"vpp needs to divide the layers of every stage, got {count} % {split.num_chunks} = "
                f"{count % split.num_chunks} on stage {stage}"
            )
    stages: list[list[range]] = [[] for _ in range(pp)]
    at = 0
    for _ in range(split.num_chunks):
        for stage, count in enumerate(counts):
            here = count // split.num_chunks
            stages[stage].append(range(at, at + here))
            at += here
    return stages


def _layers_of_stages(num_layers: int, pp: int, split: PipelineSplit) -> list[int]:
    ends = [n for n in (split.first, split.last) if n is not None]
    if ends and pp == 1:
        raise ConfigError("first_stage_layers and last_stage_layers need pp > 1, got pp 1")
    if any(n < 1 for n in ends):
        raise ConfigError(f"a stage needs at least 1 layer, got {min(ends)}")
    left, between = num_layers - sum(ends), pp - len(ends)
    if not between:
        if left:
            raise ConfigError(f"the stages need to hold {num_layers} layers, got {' + '.join(map(str, ends))}")
        return ends
    if left < 0 or left % between:
        taken = "".join(f" - {n}" for n in ends)
        raise ConfigError(
            f"pp needs to divide the layers, got ({num_layers}{taken}) % {between} = {left % between}"
            if ends
            else f"pp needs to divide the layers, got {num_layers} % {pp} = {left % pp}"
        )
    counts = [left // between] * between
    return [*([] if split.first is None else [split.first]), *counts, *([] if split.last is None else [split.last])]
