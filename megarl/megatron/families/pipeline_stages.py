"""Which layers each pipeline stage holds, as megatron-core deals them out.

8 layers, 2 stages                   stage 0: 0 1 2 3        stage 1: 4 5 6 7
the same with 2 chunks a stage       stage 0: 0 1 | 4 5      stage 1: 2 3 | 6 7
7 layers, 3 stages, 2 in the last    stage 0: 0 1 ...        does not divide: 5 % 2 = 1
7 layers, 3 stages, 3 in the first   stage 0: 0 1 2          stage 1: 3 4      stage 2: 5 6
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """How layers are dealt to pipeline stages where not simply evenly."""

    chunks: int = 1
    """Model chunks a stage, of the interleaved schedule (virtual pipeline stages)."""
    first: int | None = None
    """Layers of the first stage (`num_layers_in_first_pipeline_stage`); None: as many as the stages between."""
    last: int | None = None
    """Layers of the last stage (`num_layers_in_last_pipeline_stage`); likewise."""


EVEN = PipelineSplit()


def stage_layers(num_layers: int, pp: int, split: PipelineSplit = EVEN) -> list[list[range]]:
    """[stage][chunk] -> numbers of the layers there.

    Raises:
        ConfigError: sizes that do not divide.
    """
    counts = _layers_of_stages(num_layers, pp, split)
    if split.chunks > 1 and pp == 1:
        raise ConfigError(f"vpp needs pp > 1, got vpp {split.chunks} with pp 1")
    for stage, count in enumerate(counts):
        if count % split.chunks:
            raise ConfigError(
                f"vpp needs to divide the layers of every stage, got {count} % {split.chunks} = "
                f"{count % split.chunks} on stage {stage}"
            )
    stages: list[list[range]] = [[] for _ in range(pp)]
    at = 0
    for _ in range(split.chunks):
        for stage, count in enumerate(counts):
            here = count // split.chunks
            stages[stage].append(range(at, at + here))
            at += here
    return stages


def _layers_of_stages(num_layers: int, pp: int, split: PipelineSplit) -> list[int]:
    ends = [n for n in (split.first, split.last) if n is not None]
    if ends and pp == 1:
        raise ConfigError("the first and the last stage can have layers of their own number where pp > 1, got pp 1")
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
