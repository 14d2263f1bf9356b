"""Reward-model stage: trains reward and cost models on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import override

from megarl.config import RmConfig
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.losses.preference import BradleyTerryLoss
from megarl.megatron.requests import TrainRequest
from megarl.run.checkpointer import Checkpointer
from megarl.run.events import EventLog
from megarl.stages.pairwise import PairRewards, PairwiseRun, flatten_pairs, iter_forward_requests, make_pair_request


class RewardModelRun(PairwiseRun):
    """Trains a value model whose last value scores how good (reward) or how harmful (cost) an answer is."""

    def __init__(
        self,
        config: RmConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """Arguments as for `SupervisedRun`."""
        self._loss = BradleyTerryLoss(kind=config.rm.kind)
        safety = config.rm.kind == "cost"
        super().__init__(config, events, trainer, safety=safety, checkpoints=checkpoints, resume=resume)

    @override
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        return make_pair_request([self.pairs[i] for i in rows], self._loss, max_tokens=self.max_tokens)

    @override
    def compute_held_out_rewards(self) -> PairRewards:
        """Return the scores of the held-out pairs, negated for a cost model."""
        sign = 1.0 if self._loss.kind == "reward" else -1.0
        scores: list[float] = []
        for chunk in iter_forward_requests(flatten_pairs(self.held_out), self.trainer, self.max_tokens):
            found = self.trainer.scores(chunk)
            scores += [sign * found[ref.key] for ref in chunk.samples]
        return list(zip(scores[::2], scores[1::2], strict=True))
