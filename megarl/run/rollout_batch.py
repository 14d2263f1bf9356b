"""The completions of a step as the controller sees them: numbers, and references to where the tokens are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Any

from megarl.batch.pack import Column
from megarl.config import RunConfig
from megarl.functional import Denominators
from megarl.groups.rollout_group import FinishedGroup
from megarl.megatron.requests import EvaluationWork, Key, Loss, MiniBatch, SampleRef, TokenColumn, TrainWork
from megarl.rollout.rollout_worker import TrajectorySummary
from megarl.workers.payload import Payload


@dataclass(slots=True, kw_only=True)
class Experience:
    """Grows as models say more of it. Completions are counted group after group: N of them."""

    groups: list[FinishedGroup]
    scalars: dict[Column, list[float]] = field(default_factory=dict)
    """N numbers each."""
    columns: dict[Column, Payload[TokenColumn]] = field(default_factory=dict)
    """Token by token."""
    picked: list[int] | None = None
    """The completions to train on, some perhaps several times; None: all of them, once."""

    @property
    def summaries(self) -> list[TrajectorySummary]:
        """N."""
        return [summary for group in self.groups for summary in group.summary.trajectories]

    @property
    def rewards(self) -> list[float]:
        """N weighted sums of the reward terms."""
        return [summary.reward for summary in self.summaries]

    def term(self, name: str) -> list[float]:
        """N values of one reward term."""
        return [summary.rewards[name] for summary in self.summaries]

    @property
    def group_ids(self) -> list[int]:
        """N."""
        return [number for number, group in enumerate(self.groups) for _ in group.summary.trajectories]

    @property
    def first_of_groups(self) -> list[int]:
        """Of each group, the number of its first completion."""
        sizes = [len(group.summary.trajectories) for group in self.groups]
        return [0, *accumulate(sizes)][:-1]

    @property
    def keys(self) -> list[Key]:
        """N."""
        return [(p, i) for p, group in enumerate(self.groups) for i in range(len(group.summary.trajectories))]

    def add_rewards(self, values: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> None:
        """Complete every completion's rewards by further terms; `weights`: of all terms that count."""

        def complete(number: int, summary: TrajectorySummary) -> TrajectorySummary:
            rewards = {**summary.rewards, **{name: term[number] for name, term in values.items()}}
            return replace(summary, rewards=rewards, reward=sum(w * rewards[name] for name, w in weights.items()))

        self._score(complete)

    def add_to_rewards(self, name: str, values: Sequence[float]) -> None:
        """Another term, which is part of the sum as it is."""

        def add(number: int, summary: TrajectorySummary) -> TrajectorySummary:
            value = values[number]
            return replace(summary, rewards={**summary.rewards, name: value}, reward=summary.reward + value)

        self._score(add)

    def _score(self, score: Callable[[int, TrajectorySummary], TrajectorySummary]) -> None:
        first = self.first_of_groups
        self.groups = [
            replace(
                group,
                summary=replace(group.summary, trajectories=tuple(map(score, count(n), group.summary.trajectories))),
            )
            for n, group in zip(first, self.groups, strict=True)
        ]

    def evaluation_work(self, config: RunConfig) -> EvaluationWork:
        """All completions, for a model that is to say something of them."""
        return EvaluationWork(
            samples=tuple(self._sample(number, key, ()) for number, key in enumerate(self.keys)),
            payloads=self._payloads,
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        )

    def train_work(self, config: RunConfig, loss: Loss, columns: Mapping[Column, Column]) -> TrainWork:
        """Training on the picked completions, whole groups in each of `mini_batches` even parts.

        Args:
            columns: what the loss asks for -> what that is called here; scalars too.
        """
        algorithm, keys, summaries = config.algorithm, self.keys, self.summaries
        picked = range(len(keys)) if self.picked is None else self.picked
        by_group: list[list[int]] = [[] for _ in self.groups]
        for number in picked:
            by_group[keys[number][0]].append(number)
        starts = [round(i * len(by_group) / algorithm.mini_batches) for i in range(algorithm.mini_batches + 1)]
        positive = self.scalars.get("positive")
        mini_batches = []
        for start, stop in pairwise(starts):
            numbers = [number for group in by_group[start:stop] for number in group]
            if not numbers:
                continue
            lengths = [summaries[n].response_length for n in numbers]
            counted = [] if positive is None else [k for n, k in zip(numbers, lengths, strict=True) if positive[n]]
            mini_batches.append(
                MiniBatch(
                    samples=tuple(self._sample(n, keys[n], columns.items()) for n in numbers),
                    # at least 1: a batch in which nothing was sampled has a loss of 0, not of 0 / 0
                    denominators=Denominators(
                        num_tokens=max(1, sum(lengths)), num_sequences=len(numbers), num_positive_tokens=sum(counted)
                    ),
                )
            )
        return TrainWork(
            mini_batches=tuple(mini_batches),
            payloads=self._payloads,
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
            loss=loss,
            columns={name: self.columns[ours] for name, ours in columns.items() if ours in self.columns},
            epochs=algorithm.epochs,
        )

    @property
    def _payloads(self) -> tuple[Any, ...]:
        return tuple(group.payload for group in self.groups)

    def _sample(self, number: int, key: Key, columns: Any) -> SampleRef:
        payload, index = key
        return SampleRef(
            payload=payload,
            index=index,
            num_tokens=self.groups[payload].summary.trajectories[index].num_tokens,
            scalars={
                name: self.scalars[ours][number]
                for name, ours in columns
                if ours in self.scalars and ours not in self.columns
            },
        )


def metrics_of(batch: Experience) -> dict[str, float]:
    """Means over the step's completions."""
    groups, summaries = batch.groups, batch.summaries
    num = len(summaries)
    metrics = {
        "reward/mean": sum(t.reward for t in summaries) / num,
        "reward/informative_groups": sum(len({t.reward for t in group.summary.trajectories}) > 1 for group in groups)
        / len(groups),
        "response/length": sum(t.response_length for t in summaries) / num,
        "response/truncated": sum(t.finish_reason == "length" for t in summaries) / num,
        "rollout/generation_seconds_max": max(group.summary.generation_seconds for group in groups),
        "rollout/scoring_seconds_max": max(group.summary.scoring_seconds for group in groups),
        "policy_version/min": min(t.min_policy_version for t in summaries),
    }
    for name in summaries[0].rewards:
        metrics[f"reward/{name}"] = sum(t.rewards[name] for t in summaries) / num
    if (advantages := batch.scalars.get("advantages")) is not None:
        metrics["advantage/abs_mean"] = sum(map(abs, advantages)) / num
    return metrics
