"""Finished groups -> what the trainer is told to do. Only scalars pass through here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.advantages import GroupBaseline, group_advantages
from megarl.algorithms.losses import Denominators
from megarl.config import RunConfig
from megarl.controller.rollout_group import FinishedGroup
from megarl.megatron.work import MiniBatch, SampleRef, TrainWork


def grpo_advantages(groups: Sequence[FinishedGroup], *, normalize_by_std: bool) -> list[float]:
    """One a trajectory, group after group."""
    rewards = [t.reward for group in groups for t in group.summary.trajectories]
    ids = [i for i, group in enumerate(groups) for _ in group.summary.trajectories]
    kind: GroupBaseline = "grpo" if normalize_by_std else "dr_grpo"
    advantages: list[float] = group_advantages(torch.tensor(rewards), torch.tensor(ids), kind=kind).tolist()
    return advantages


def policy_work(config: RunConfig, groups: Sequence[FinishedGroup], advantages: Sequence[float]) -> TrainWork:
    """The step's groups in `mini_batches` equal parts, whole groups each."""
    remaining = iter(advantages)
    samples = [
        [
            SampleRef(payload=payload, index=index, num_tokens=t.num_tokens, advantage=next(remaining))
            for index, t in enumerate(group.summary.trajectories)
        ]
        for payload, group in enumerate(groups)
    ]
    lengths = [sum(t.response_length for t in group.summary.trajectories) for group in groups]
    per_batch = len(groups) // config.algorithm.mini_batches
    batches = []
    for start in range(0, len(groups), per_batch):
        part = [sample for group in samples[start : start + per_batch] for sample in group]
        # at least 1: a batch in which nothing was sampled has a loss of 0, not of 0 / 0
        tokens = max(1, sum(lengths[start : start + per_batch]))
        batches.append(
            MiniBatch(samples=tuple(part), denominators=Denominators(num_tokens=tokens, num_sequences=len(part)))
        )
    return TrainWork(
        mini_batches=tuple(batches),
        payloads=tuple(group.payload for group in groups),
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        policy_loss=config.algorithm,
        length_norm=config.algorithm.length_norm or config.rollout.max_new_tokens,
    )
