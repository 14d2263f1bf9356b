"""Ranks that score tokens: what the controller sends, what it may call, what comes back. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megarl.batch.balance import QWEN2_5_7B, SequenceCost
from megarl.batch.trajectory import Trajectory
from megarl.megatron.requests import ModelSpec, micro_batches_of_replicas
from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import Transfer
from megarl.workers.payload import Payload

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import ModelRank


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWork:
    """Token sequences to score."""

    sequences: Payload[Sequence[NDArray[np.int32]]]
    """[sequence][token]."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    max_tokens_per_micro_batch: int
    cost: SequenceCost = QWEN2_5_7B
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into the sequences; set by dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceScores:
    """Of a sequence of n tokens; entry i is about token i + 1, given the tokens before it."""

    logprobs: NDArray[np.float32]
    """[n - 1]."""
    entropy: NDArray[np.float32]
    """[n - 1], in nats: of the distribution that token i + 1 was drawn from."""


Scores = dict[int, SequenceScores]
"""By index into the sequences of the work."""


class ScoreWorker:
    """One rank with its shards of the model alone: no gradient buffers, no optimizer."""

    def __init__(self, spec: ModelSpec) -> None:
        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.modeling.megatron_model import ModelRank

        self._rank: ModelRank = ModelRank(spec)

    def score(self, work: ScoreWork) -> Scores:
        """The scores of this replica's sequences, on its answering rank (`RankGrid.output_rank`); else nothing."""
        sequences = work.sequences.fetch()
        batches = [[_unsampled(sequences[i]) for i in indices] for indices in work.micro_batches]
        scored = self._rank.score(batches)
        groups = self._rank.groups
        if not (self._rank.is_last and groups.tp.rank() == groups.cp.rank() == 0):
            return {}
        return {
            index: SequenceScores(logprobs=logprobs.numpy(), entropy=entropy.numpy())
            for indices, batch in zip(work.micro_batches, scored, strict=True)
            for index, (logprobs, entropy) in zip(indices, batch, strict=True)
        }


def _unsampled(token_ids: NDArray[np.int32]) -> Trajectory:
    n = len(token_ids)
    return Trajectory(
        prompt_id="",
        group_id=0,
        token_ids=token_ids,
        loss_mask=np.zeros(n, np.bool_),
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.full(n, -1, np.int32),
    )


def _split(work: ScoreWork, grid: RankGrid) -> list[ScoreWork]:
    plan = micro_batches_of_replicas(work.lengths, grid, max_tokens=work.max_tokens_per_micro_batch, cost=work.cost)
    works = [replace(work, micro_batches=micro_batches) for micro_batches in plan]
    return [works[grid.coordinates(rank).dp] for rank in range(grid.size)]


def _merge(results: Sequence[Scores], _: RankGrid) -> Scores:
    return reduce(or_, results)


SCORE_BY_DP: Transfer[ScoreWork, Scores] = Transfer(_split, _merge)
"""Sequences split over data-parallel replicas, and the scores of all of them."""
