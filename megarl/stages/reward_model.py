"""Reward and cost models from pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.config import RmConfig
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.requests import PairLoss, TrainWork
from megarl.run.checkpointer import Checkpointer
from megarl.run.events import EventLog
from megarl.stages.pairwise import PairsRun, Rewards, answers_of, evaluation_chunks, pair_work


class RmRun(PairsRun):
    """A value model whose last value says how good, or how harmful, an answer is."""

    def __init__(
        self,
        config: RmConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """See `SupervisedRun`."""
        self._loss = PairLoss(kind=config.rm.kind)
        safety = config.rm.kind == "cost"
        super().__init__(config, events, trainer, safety=safety, checkpoints=checkpoints, resume=resume)

    def work(self, rows: Sequence[int]) -> TrainWork:
        """See `SupervisedRun`."""
        return pair_work([self.pairs[i] for i in rows], self.trainer, self._loss, max_tokens=self.max_tokens)

    def held_out_rewards(self) -> Rewards:
        """Scores; of a cost model, the same with the other sign."""
        sign = 1.0 if self._loss.kind == "reward" else -1.0
        scores: list[float] = []
        for chunk in evaluation_chunks(answers_of(self.held_out), self.trainer, self.max_tokens):
            found = self.trainer.scores(chunk)
            scores += [sign * found[ref.key] for ref in chunk.samples]
        return list(zip(scores[::2], scores[1::2], strict=True))
