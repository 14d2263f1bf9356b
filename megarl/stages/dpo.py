"""Direct preference optimisation: a policy from pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megarl.batch.pack import PerToken
from megarl.batch.trajectory import Trajectory
from megarl.config import DpoConfig
from megarl.data.sampler import PromptSampler
from megarl.groups.trainer_group import FrozenGroup, TrainerGroup
from megarl.megatron.requests import DirectPreferenceLoss, TrainWork
from megarl.run.checkpointer import Checkpointer
from megarl.run.events import EventLog, Phase
from megarl.stages.pairwise import PairsRun, Rewards, answers_of, evaluation_chunks, pair_work


class DpoRun(PairsRun):
    """Asks the reference once, before the first step, and keeps nothing of it but the log-probabilities.

    Where no other model is given, the trainer itself is the reference at that moment: there is no second copy. A run
    that goes on from a checkpoint asks again, before it loads it.
    """

    def __init__(
        self,
        config: DpoConfig,
        events: EventLog,
        trainer: TrainerGroup,
        reference: FrozenGroup | None = None,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """`reference`: None where it is the model that training starts from, and which `trainer` still is."""
        super().__init__(config, events, trainer, safety=False, checkpoints=checkpoints, resume=resume)
        self._config, self._reference = config, reference
        self._loss = DirectPreferenceLoss(beta=config.dpo.beta, nll=config.dpo.nll)
        self._ref_logprobs: Mapping[int, tuple[PerToken, PerToken]] = {}
        self._held_out_ref: Sequence[float] = ()

    def begin(self) -> None:
        """Ask the reference."""
        with self.phase("reference"):
            self._ask_reference()

    def work(self, rows: Sequence[int]) -> TrainWork:
        """See `SupervisedRun`."""
        return pair_work(
            [self.pairs[i] for i in rows],
            self.trainer,
            self._loss,
            max_tokens=self.max_tokens,
            ref_logprobs=[of for i in rows for of in self._ref_logprobs[i]],
        )

    def held_out_rewards(self) -> Rewards:
        """Of each answer, beta * (log pi - log pi_reference)."""
        answers = answers_of(self.held_out)
        found = self._logprobs(self.trainer, answers)
        rewards = [
            self._config.dpo.beta * (answer_logprob(answer, of) - ref)
            for answer, of, ref in zip(answers, found, self._held_out_ref, strict=True)
        ]
        return list(zip(rewards[::2], rewards[1::2], strict=True))

    def _ask_reference(self) -> None:
        """Of the pairs that the run will train on, and of those held out."""
        config, model = self._config, self._reference or self.trainer
        rows = rows_used(config, len(self.pairs))
        held_out = answers_of(self.held_out)
        found = self._logprobs(model, answers_of([self.pairs[i] for i in rows]) + held_out, what="reference")
        self._ref_logprobs = {row: (found[2 * i], found[2 * i + 1]) for i, row in enumerate(rows)}
        of_held_out = found[2 * len(rows) :]
        self._held_out_ref = [answer_logprob(answer, of) for answer, of in zip(held_out, of_held_out, strict=True)]

    def _logprobs(
        self, model: TrainerGroup | FrozenGroup, answers: Sequence[Trajectory], *, what: str | None = None
    ) -> list[PerToken]:
        """By answer; `what`: say how far it is."""
        logprobs: list[PerToken] = []
        for chunk in evaluation_chunks(answers, model, self.max_tokens):
            found = {key: of for part in model.logprobs(chunk).fetch() for key, of in part.items()}
            # copies: what came through shared memory would stay there
            logprobs += [found[ref.key].copy() for ref in chunk.samples]
            if what is not None:
                self._events.add(Phase(self.step, f"{what} {len(logprobs):,}/{len(answers):,} answers"))
        return logprobs


def rows_used(config: DpoConfig, num_rows: int) -> list[int]:
    """The rows that the run will take."""
    needed = config.trainer.steps * config.trainer.batch_size
    if needed >= num_rows:
        return list(range(num_rows))
    return sorted(PromptSampler(num_rows, config.seed, config.data.shuffle).take(needed))


def answer_logprob(answer: Trajectory, logprobs: PerToken) -> float:
    """Of the answer as a whole, given the prompt."""
    return float(np.sum(logprobs, where=answer.loss_mask, dtype=np.float64))
