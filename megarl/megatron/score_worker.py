"""Offline scoring of token sequences on one Megatron rank: request, worker and result. Imports nothing heavy."""

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
from megarl.megatron.request_split import plan_replica_micro_batches
from megarl.megatron.requests import ModelSpec
from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import Dispatch
from megarl.workers.payload import Payload

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import MegatronModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Request to score token sequences."""

    sequences: Payload[Sequence[NDArray[np.int32]]]
    """Token ids, int32 [num_tokens] for each sequence."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    max_tokens_per_micro_batch: int
    cost: SequenceCost = QWEN2_5_7B
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into the sequences; set by dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceScores:
    """Scores of a sequence of n tokens; entry i belongs to token i + 1, given the tokens before it."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of tokens 1 to n - 1, float32 [n - 1]."""
    entropy: NDArray[np.float32]
    """Entropy of the distribution that token i + 1 is drawn from, in nats, float32 [n - 1]."""


Scores = dict[int, SequenceScores]
"""Scores by index into the sequences of the request."""


class ScoreWorker:
    """One rank that holds only its shards of the weights: no gradient buffers, no optimizer."""

    def __init__(self, spec: ModelSpec) -> None:
        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.modeling.megatron_model import MegatronModel

        self._model: MegatronModel = MegatronModel(spec)

    def score(self, request: ScoreRequest) -> Scores:
        """Return the scores of this replica's sequences on its output rank (`RankGrid.output_rank`), else {}."""
        sequences = request.sequences.fetch()
        batches = [[_as_trajectory(sequences[i]) for i in indices] for indices in request.micro_batches]
        scored = self._model.score(batches)
        groups = self._model.groups
        if not (self._model.is_last_stage and groups.tp.rank() == groups.cp.rank() == 0):
            return {}
        return {
            index: SequenceScores(logprobs=logprobs.numpy(), entropy=entropy.numpy())
            for indices, batch in zip(request.micro_batches, scored, strict=True)
            for index, (logprobs, entropy) in zip(indices, batch, strict=True)
        }


def _as_trajectory(token_ids: NDArray[np.int32]) -> Trajectory:
    n = len(token_ids)
    return Trajectory(
        prompt_id="",
        group_id=0,
        token_ids=token_ids,
        loss_mask=np.zeros(n, np.bool_),
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.full(n, -1, np.int32),
    )


def _split(request: ScoreRequest, grid: RankGrid) -> list[ScoreRequest]:
    plan = plan_replica_micro_batches(
        request.lengths, grid, max_tokens=request.max_tokens_per_micro_batch, cost=request.cost
    )
    requests = [replace(request, micro_batches=micro_batches) for micro_batches in plan]
    return [requests[grid.coordinates(rank).dp] for rank in range(grid.size)]


def _merge(results: Sequence[Scores], _: RankGrid) -> Scores:
    return reduce(or_, results)


SCORE_BY_DP: Dispatch[ScoreRequest, Scores] = Dispatch(_split, _merge)
"""Splits sequences over data-parallel replicas and merges the scores of all replicas."""
