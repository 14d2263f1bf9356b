"""Direct preference optimization (DPO): trains a policy on preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import override

import numpy as np

from megarl.batch.pack import PerToken
from megarl.batch.trajectory import Trajectory
from megarl.config import DpoConfig
from megarl.data.sampler import PromptOrder, PromptSampler
from megarl.losses.preference_loss import DpoLoss
from megarl.megatron.requests import TrainRequest
from megarl.run.checkpointer import Checkpointer
from megarl.run.remote.trainer_group import FrozenGroup, TrainerGroup
from megarl.run.run_events import EventLog, PhaseEvent
from megarl.stages.pairwise import PairRewards, PairwiseRun, flatten_pairs, iter_forward_requests, make_pair_request


class DpoRun(PairwiseRun):
    """DPO with reference log-probabilities that are computed once, before the first step.

    Without a separate reference model the trainer itself computes them, as it still has the initial weights: there is
    no second copy. A resumed run recomputes them before it loads the checkpoint.
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
        """`reference`: separate reference model; None: the initial weights, which `trainer` still has."""
        super().__init__(config, events, trainer, safety=False, checkpoints=checkpoints, resume=resume)
        self._config, self._reference = config, reference
        self._loss = DpoLoss(beta=config.dpo.beta, nll=config.dpo.nll)
        self._ref_logprobs: Mapping[int, tuple[PerToken, PerToken]] = {}
        self._held_out_ref: Sequence[float] = ()

    @override
    def prepare(self) -> None:
        with self.phase("reference"):
            self._compute_reference_logprobs()

    @override
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        return make_pair_request(
            [self.pairs[i] for i in rows],
            self._loss,
            max_tokens=self.max_tokens,
            ref_logprobs=[of for i in rows for of in self._ref_logprobs[i]],
        )

    @override
    def compute_held_out_rewards(self) -> PairRewards:
        """Return beta * (log pi - log pi_reference) of the chosen and of the rejected answer of each held-out pair."""
        answers = flatten_pairs(self.held_out)
        found = self._compute_logprobs(self.trainer, answers)
        rewards = [
            self._config.dpo.beta * (sum_answer_logprobs(answer, of) - ref)
            for answer, of, ref in zip(answers, found, self._held_out_ref, strict=True)
        ]
        return list(zip(rewards[::2], rewards[1::2], strict=True))

    def _compute_reference_logprobs(self) -> None:
        """Compute the reference log-probabilities of the pairs that the run trains on and of the held-out pairs."""
        config, model = self._config, self._reference or self.trainer
        rows = select_rows(config, len(self.pairs))
        held_out = flatten_pairs(self.held_out)
        found = self._compute_logprobs(model, flatten_pairs([self.pairs[i] for i in rows]) + held_out, what="reference")
        self._ref_logprobs = {row: (found[2 * i], found[2 * i + 1]) for i, row in enumerate(rows)}
        held_out_ref = found[2 * len(rows) :]
        self._held_out_ref = [
            sum_answer_logprobs(answer, of) for answer, of in zip(held_out, held_out_ref, strict=True)
        ]

    def _compute_logprobs(
        self, model: TrainerGroup | FrozenGroup, answers: Sequence[Trajectory], *, what: str | None = None
    ) -> list[PerToken]:
        """Return the log-probabilities of each answer; `what`: label under which progress is reported, None: silent."""
        logprobs: list[PerToken] = []
        for chunk in iter_forward_requests(answers, model, self.max_tokens):
            found = {key: of for part in model.logprobs(chunk).fetch() for key, of in part.items()}
            # copied, because views would keep the shared memory allocated
            logprobs += [found[ref.key].copy() for ref in chunk.samples]
            if what is not None:
                self._events.add(PhaseEvent(self.step, f"{what} {len(logprobs):,}/{len(answers):,} answers"))
        return logprobs


def select_rows(config: DpoConfig, num_rows: int) -> list[int]:
    """Return the indices of the rows that the run trains on, in ascending order."""
    needed = config.trainer.steps * config.trainer.batch_size
    if needed >= num_rows:
        return list(range(num_rows))
    return sorted(PromptSampler(PromptOrder(num_rows, config.seed, config.data.shuffle)).take(needed))


def sum_answer_logprobs(answer: Trajectory, logprobs: PerToken) -> float:
    """Return the log-probability of the answer given the prompt: the sum over its sampled tokens."""
    return float(np.sum(logprobs, where=answer.loss_mask, dtype=np.float64))
