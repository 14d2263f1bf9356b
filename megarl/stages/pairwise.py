"""Learning from pairs of answers, one of them preferred: the data, a step's work, and the held-out pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.batch.pack import Column, PerToken
from megarl.batch.trajectory import Trajectory
from megarl.config import StageConfig
from megarl.data.preference_pairs import PreferencePair, load_preferences
from megarl.data.tokenizer import load_tokenizer
from megarl.functional import Denominators
from megarl.groups.trainer_group import FrozenGroup, TrainerGroup
from megarl.megatron.families.model_folder import read_hf_config
from megarl.megatron.requests import (
    DirectPreferenceLoss,
    EvaluationWork,
    MiniBatch,
    PairLoss,
    SampleRef,
    TrainWork,
)
from megarl.process.torchrun_env import torchrun_world
from megarl.run.checkpointer import Checkpointer
from megarl.run.events import EventLog
from megarl.stages.supervised import SupervisedRun

MICRO_BATCHES_PER_CHUNK = 16
"""Of each replica, when full: enough to balance the replicas and to fill a pipeline."""

Rewards = Sequence[tuple[float, float]]
"""By pair, of the chosen and of the rejected answer: the higher the better."""


class PairsRun(SupervisedRun):
    """Pairs in, one optimizer step a batch; held-out pairs are told apart before and after."""

    def __init__(
        self,
        config: StageConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        safety: bool,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """`safety`: which answers are safe is read as well; for the rest see `SupervisedRun`."""
        tokenizer = load_tokenizer(config.model.path)
        context = int(read_hf_config(Path(config.model.path))["max_position_embeddings"])

        def load(path: str) -> list[PreferencePair]:
            return load_preferences(config.data, tokenizer, max_tokens=context, path=path, safety=safety)

        self.pairs = load(config.data.path)
        eval_path = config.data.eval_path
        self.held_out = load(eval_path)[: config.data.eval_size] if eval_path is not None else []
        self._run_dir = Path(config.run_dir)
        self.max_tokens = config.trainer.max_tokens_per_micro_batch
        super().__init__(config, events, trainer, num_rows=len(self.pairs), checkpoints=checkpoints, resume=resume)

    @abstractmethod
    def held_out_rewards(self) -> Rewards:
        """What the model as it is thinks of the held-out pairs."""

    def evaluate(self) -> None:
        """Log the share of held-out pairs that are told apart, and by how much the rewards differ."""
        if not self.held_out:
            return
        with self.phase("evaluate"):
            rewards = self.held_out_rewards()
        accuracy, gap = preference_accuracy(rewards), sum(better - worse for better, worse in rewards) / len(rewards)
        self._books.evaluations[self.step] = accuracy
        self.log({"eval/accuracy": accuracy, "eval/gap": gap})
        self.say(f"step {self.step}: accuracy {accuracy:.3f}, gap {gap:.3g} on {len(rewards)} held-out pairs")

    def finish(self) -> None:
        """Write `summary.json` and close the books."""
        books = self._books.by(self.timer)
        summary = books.summary(step=self.step, steps_planned=self._stage.trainer.steps)
        world = torchrun_world()
        if world is None or world.rank == 0:
            summary.write(self._run_dir / "summary.json")
        before, after = summary.eval_before, summary.eval_after
        if before is not None and after is not None:
            self.say(f"held-out accuracy {before:.3f} -> {after:.3f} on {len(self.held_out)} pairs")
        self.close()


def preference_accuracy(rewards: Rewards) -> float:
    """The share of pairs whose chosen answer has the higher reward; a tie is half a pair, as a coin would have it."""
    return sum(1.0 if better > worse else 0.5 if better == worse else 0.0 for better, worse in rewards) / len(rewards)


def answers_of(pairs: Sequence[PreferencePair]) -> list[Trajectory]:
    """Of each pair the chosen answer, then the rejected one."""
    return [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]


def pair_work(
    pairs: Sequence[PreferencePair],
    trainer: TrainerGroup,
    loss: PairLoss | DirectPreferenceLoss,
    *,
    max_tokens: int,
    ref_logprobs: Sequence[PerToken] | None = None,
) -> TrainWork:
    """One optimizer step of `trainer` on the pairs.

    Args:
        max_tokens: of a micro-batch.
        ref_logprobs: of `answers_of(pairs)`, for a loss that asks for them.
    """
    answers = answers_of(pairs)
    scalars = [pair_scalars(pair) if isinstance(loss, PairLoss) else ({}, {}) for pair in pairs]
    samples = tuple(
        SampleRef(payload=0, index=i, num_tokens=answer.num_tokens, scalars=scalars[i // 2][i % 2])
        for i, answer in enumerate(answers)
    )
    tokens = sum(int(answer.loss_mask.sum()) for answer in answers)
    batch = MiniBatch(samples=samples, denominators=Denominators(num_tokens=tokens, num_sequences=len(answers)))
    column = None if ref_logprobs is None else {(0, i): of for i, of in enumerate(ref_logprobs)}
    return TrainWork(
        mini_batches=(batch,),
        payloads=(trainer.group.put(answers),),
        max_tokens_per_micro_batch=max_tokens,
        loss=loss,
        columns={} if column is None else {"ref_logprobs": trainer.group.put([column])},
        together=2,
    )


def pair_scalars(pair: PreferencePair) -> tuple[Mapping[Column, float], Mapping[Column, float]]:
    """Of the chosen and of the rejected answer: the pair's margin, and, where it is known, a sign: 1 for harm."""
    margin: dict[Column, float] = {"margins": pair.margin}
    if pair.safe is None:
        return margin, margin
    chosen, rejected = (-1.0 if safe else 1.0 for safe in pair.safe)
    return {**margin, "signs": chosen}, {**margin, "signs": rejected}


def evaluation_chunks(
    answers: Sequence[Trajectory], group: TrainerGroup | FrozenGroup, max_tokens: int
) -> Iterator[EvaluationWork]:
    """The answers in order, in as many pieces of work as bounded memory asks for; keys are (0, index in the piece).

    Args:
        max_tokens: of a micro-batch.
    """
    start = num_tokens = 0
    room = group.grid.dp * MICRO_BATCHES_PER_CHUNK * max_tokens
    for end, answer in enumerate(answers, start=1):
        num_tokens += answer.num_tokens
        if num_tokens >= room or end == len(answers):
            yield evaluation_work(answers[start:end], group, max_tokens)
            start, num_tokens = end, 0


def evaluation_work(
    answers: Sequence[Trajectory], group: TrainerGroup | FrozenGroup, max_tokens: int
) -> EvaluationWork:
    """The answers for `group` to evaluate, in micro-batches of `max_tokens`."""
    return EvaluationWork(
        samples=tuple(SampleRef(payload=0, index=i, num_tokens=a.num_tokens) for i, a in enumerate(answers)),
        payloads=(group.group.put(list(answers)),),
        max_tokens_per_micro_batch=max_tokens,
    )
