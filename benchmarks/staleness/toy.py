"""A small policy trained on samples of older versions, with megarl's loss, on the CPU.

Prompts ask for sequences of a few tokens, each of which is right or wrong; the reward is the share of right ones. The
policy is a linear function of features that all prompts share, with too few weights to get all of them right. Every
step has one update, by Adam, and its samples are those of the version `staleness` updates before.

Shapes: P prompts, N completions, L positions, V vocabulary, D weights, T = N L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.batch.pack import PackedBatch
from megarl.config.algorithm import GrpoConfig
from megarl.config.policy import DecoupledConfig, RolloutIsConfig
from megarl.functional import Denominators, Sequences, group_advantages
from megarl.losses.loss import LossBatch, TokenScores
from megarl.losses.policy_loss import ClippedLoss, PolicyLoss

CORRECTIONS: Mapping[str, GrpoConfig] = {
    "token_tis": GrpoConfig(kl_loss=None, rollout_is=RolloutIsConfig()),
    "decoupled": GrpoConfig(kl_loss=None, decoupled=DecoupledConfig()),
    "none": GrpoConfig(kl_loss=None),
}
"""By name, with the defaults otherwise. `decoupled` with `behave_cap: 2` is the same as `token_tis`."""
STALENESS = (0, 1, 2, 4, 8)
MIN_CORRECTED, MAX_UNCORRECTED = 0.98, 0.90
"""Reward over that of samples without staleness: at least, with a correction; at most, without and at staleness 8. If
the second is missed, the problem is too easy to tell a correction from none."""
NUM_LAST_STEPS = 20
"""The final reward is the mean over so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyReport:
    """Rewards of one correction at one staleness."""

    correction: str
    staleness: int
    """Age of the samples in updates."""
    reward: float
    """Mean over the seeds."""
    reward_min: float
    """Of the worst seed."""
    over_fresh: float
    """`reward` divided by that at staleness 0."""

    @property
    def reaches_target(self) -> bool:
        """Whether the reward is on its side of `MIN_CORRECTED` or `MAX_UNCORRECTED`."""
        if self.correction == "none":
            return self.staleness < max(STALENESS) or self.over_fresh <= MAX_UNCORRECTED
        return self.over_fresh >= MIN_CORRECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Sizes of the problem and its training."""

    num_prompts: int = 16
    group_size: int = 16
    length: int = 3
    vocabulary: int = 8
    num_weights: int = 32
    noise: float = 0.5
    """Share of the right answers that no weights give, as noise of the scores that determine them."""
    learning_rate: float = 0.1
    num_steps: int = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyProblem:
    """Features and right answers."""

    features_PLVD: Tensor
    is_right_PLV: Tensor
    """float32: 1 for the right token of each position."""

    @classmethod
    def draw(cls, toy: Toy, generator: torch.Generator) -> ToyProblem:
        """Return a random problem."""
        shape = (toy.num_prompts, toy.length, toy.vocabulary)
        features_PLVD = torch.randn(*shape, toy.num_weights, generator=generator)
        scores_PLV = features_PLVD @ torch.randn(toy.num_weights, generator=generator)
        scores_PLV += toy.noise * toy.num_weights**0.5 * torch.randn(shape, generator=generator)
        return cls(
            features_PLVD=features_PLVD,
            is_right_PLV=torch.zeros(shape).scatter(2, scores_PLV.argmax(2, keepdim=True), 1.0),
        )

    def logprobs(self, weights_D: Tensor) -> Tensor:
        """Return the log-probabilities of all tokens, [P, L, V]."""
        return torch.log_softmax(self.features_PLVD @ weights_D, -1)

    def expected_reward(self, weights_D: Tensor) -> float:
        """Return the exact mean reward of the policy."""
        return float((self.logprobs(weights_D).exp() * self.is_right_PLV).sum(-1).mean())


def run_toy(toy: Toy, staleness: Sequence[int] = STALENESS, *, num_seeds: int = 5) -> Iterator[ToyReport]:
    """Train with each correction and staleness, and yield the reports."""
    fresh = _mean(_rewards(toy, "none", 0, num_seeds))
    for correction in CORRECTIONS:
        for age in staleness:
            rewards = _rewards(toy, correction, age, num_seeds)
            yield ToyReport(
                correction=correction,
                staleness=age,
                reward=_mean(rewards),
                reward_min=min(rewards),
                over_fresh=_mean(rewards) / fresh,
            )


def _rewards(toy: Toy, correction: str, staleness: int, num_seeds: int) -> list[float]:
    return [final_reward(toy, CORRECTIONS[correction], staleness, seed) for seed in range(num_seeds)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def final_reward(toy: Toy, algorithm: GrpoConfig, staleness: int, seed: int) -> float:
    """Train, and return the mean expected reward of the last steps.

    Args:
        staleness: how many updates older the samples are than the policy that trains on them.
        seed: of the problem and the samples; the same for all corrections and stalenesses.
    """
    generator = torch.Generator().manual_seed(seed)
    problem = ToyProblem.draw(toy, generator)
    weights_D = torch.zeros(toy.num_weights, requires_grad=True)
    optimizer = torch.optim.Adam([weights_D], lr=toy.learning_rate)
    loss = PolicyLoss(token_loss=ClippedLoss.of(algorithm), algorithm=algorithm, length_norm=1)
    versions, rewards = list[Tensor](), list[float]()
    for step in range(toy.num_steps):
        versions.append(weights_D.detach().clone())
        tokens_PGL, sampled_PGL = _sample(toy, problem, versions[max(0, step - staleness)], generator)
        logprobs_T = _of_tokens(problem.logprobs(weights_D), tokens_PGL).flatten()
        batch = _loss_batch(problem, tokens_PGL, sampled_PGL, logprobs_T.detach())
        optimizer.zero_grad()
        output = loss(TokenScores(logprobs_T=logprobs_T, entropy_T=torch.zeros_like(logprobs_T)), batch)
        output.loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= toy.num_steps - NUM_LAST_STEPS:
            rewards.append(problem.expected_reward(weights_D.detach()))
    return _mean(rewards)


def _sample(toy: Toy, problem: ToyProblem, weights_D: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sampled tokens and their log-probabilities, [P, group_size, L] each."""
    logprobs_PLV = problem.logprobs(weights_D)
    rows = torch.multinomial(logprobs_PLV.exp().flatten(0, 1), toy.group_size, replacement=True, generator=generator)
    tokens_PGL = rows.view(toy.num_prompts, toy.length, toy.group_size).transpose(1, 2)
    return tokens_PGL, _of_tokens(logprobs_PLV, tokens_PGL)


def _of_tokens(values_PLV: Tensor, tokens_PGL: Tensor) -> Tensor:
    """Return the values of the tokens, [P, group_size, L]."""
    return values_PLV.gather(2, tokens_PGL.transpose(1, 2)).transpose(1, 2)


def _loss_batch(problem: ToyProblem, tokens_PGL: Tensor, sampled_PGL: Tensor, old_logprobs_T: Tensor) -> LossBatch:
    num_prompts, group_size, length = tokens_PGL.shape
    num_completions, num_tokens = num_prompts * group_size, tokens_PGL.numel()
    rewards_N = _of_tokens(problem.is_right_PLV, tokens_PGL).mean(-1).flatten()
    groups_N = torch.arange(num_prompts).repeat_interleave(group_size)
    advantages_N = group_advantages(rewards_N, groups_N, kind="grpo")
    cu_seqlens_S = torch.arange(num_completions + 1, dtype=torch.int32) * length
    pack = PackedBatch(
        token_ids_T=tokens_PGL.flatten(),
        position_ids_T=torch.arange(length).repeat(num_completions),
        target_ids_T=tokens_PGL.flatten(),
        mask_T=torch.ones(num_tokens, dtype=torch.bool),
        rollout_logprobs_T=sampled_PGL.flatten(),
        sequence_tokens_T=torch.full((num_tokens,), float(length)),
        sequence_ids_T=torch.arange(num_completions).repeat_interleave(length),
        ends_T=(torch.arange(length) == length - 1).repeat(num_completions),
        cu_seqlens_S=cu_seqlens_S,
        columns={"advantages": advantages_N.repeat_interleave(length), "old_logprobs": old_logprobs_T},
    )
    return LossBatch(
        pack=pack,
        denominators=Denominators(num_tokens=num_tokens, num_sequences=num_completions),
        sequences=Sequences.of(cu_seqlens_S),
    )
