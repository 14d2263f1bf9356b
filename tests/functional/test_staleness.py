"""Expected gradients on samples of older policies, by enumeration of all sequences.

A policy is a table of logits: one row per prefix. Older versions sample some of the tokens of a sequence, the last
version trains on all of them. megarl's loss is summed over all sequences, each times the probability that the versions
give it. It is compared with derivatives that use no log-probability ratio: by recursion over the prefixes, or as the
derivative of an expected reward.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.batch.pack import SampleRef, pack
from megarl.batch.trajectory import Trajectory
from megarl.config.algorithm import GrpoConfig
from megarl.config.policy import DecoupledConfig, RolloutIsConfig
from megarl.functional import Denominators, Sequences
from megarl.losses import ClippedLoss, LossBatch, PolicyLoss, TokenScores
from megarl.megatron.request_samples import StepSamples
from megarl.megatron.requests import VersionRange
from tests.megatron.fidelity.measure import as_trajectory

VOCABULARY, LENGTH, TOLERANCE = 5, 3, 1e-6
CURRENT = 2
"""The version that trains; 0 and 1 are older."""
SPREAD = 1.2
"""Of the logits, from one version to the next: each truncation tested applies to some tokens of version 0."""
PREFIXES = [prefix for length in range(LENGTH) for prefix in product(range(VOCABULARY), repeat=length)]
SEQUENCES = list(product(range(VOCABULARY), repeat=LENGTH))
ROW = {prefix: row for row, prefix in enumerate(PREFIXES)}

Prefix = tuple[int, ...]
Versions = Callable[[Prefix], int]
"""Which version samples the token after a prefix."""

rng = np.random.default_rng(0)
REWARDS = dict(zip(SEQUENCES, rng.normal(size=len(SEQUENCES)), strict=True))
STEPS = rng.normal(size=(CURRENT + 1, len(PREFIXES), VOCABULARY)) * [[[1.0]], [[SPREAD]], [[SPREAD]]]
LOGITS = STEPS.cumsum(axis=0)
"""By version, [prefixes, VOCABULARY]: each version differs from the one before."""
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def by_position(*versions: int) -> Versions:
    return lambda prefix: versions[len(prefix)]


def by_odd_tokens(prefix: Prefix) -> int:
    """A push comes at a time that depends on what was sampled before it."""
    return min(CURRENT, sum(token % 2 for token in prefix))


SWITCHES: dict[str, Versions] = {
    "".join(map(str, versions)): by_position(*versions)
    for versions in combinations_with_replacement(range(CURRENT + 1), LENGTH)
} | {"after odd tokens": by_odd_tokens}
STALE = [name for name in SWITCHES if name != str(CURRENT) * LENGTH]


def probability(prefix: Prefix, token: int, version: int) -> float:
    return float(PROBABILITIES[version, ROW[prefix], token])


def steps(sequence: Prefix) -> Iterator[tuple[Prefix, int]]:
    """Yield each prefix of the sequence and the token after it."""
    for position, token in enumerate(sequence):
        yield sequence[:position], token


def sampled_probability(sequence: Prefix, versions: Versions) -> float:
    return float(np.prod([probability(prefix, token, versions(prefix)) for prefix, token in steps(sequence)]))


def trajectories(versions: Versions) -> list[Trajectory]:
    """Return all sequences as the engines return them, after a prompt of one token."""
    sampled_by = [[-1, *(versions(prefix) for prefix, _ in steps(sequence))] for sequence in SEQUENCES]
    return [
        replace(as_trajectory([0, *sequence]), policy_versions=np.array(of, np.int32))
        for sequence, of in zip(SEQUENCES, sampled_by, strict=True)
    ]


def per_token(value: Callable[[Prefix, int], float]) -> Tensor:
    """Return a number for each position of the pack; 0 at the end of each sequence, which predicts nothing."""
    rows = [[*(value(prefix, token) for prefix, token in steps(sequence)), 0.0] for sequence in SEQUENCES]
    return torch.tensor(rows, dtype=torch.double).flatten()


def expected_gradient(versions: Versions, *, oldest: int = 0, **algorithm: Any) -> np.ndarray:
    """Return the gradient of megarl's loss for the logits, [prefixes, VOCABULARY], times -1.

    `algorithm` is the correction; tokens of versions older than `oldest` leave the loss.
    """
    config = GrpoConfig(kl_loss=None, aggregation="seq-mean-token-sum", **algorithm)
    kept = VersionRange(current=CURRENT, oldest=oldest, num_current_tokens=0)
    samples = StepSamples({0: trajectories(versions)}, {}, kept)
    refs = [SampleRef(payload=0, index=i, num_tokens=LENGTH + 1) for i in range(len(SEQUENCES))]
    packed = pack([samples.trajectory(ref) for ref in refs])
    logits = torch.tensor(LOGITS[CURRENT], requires_grad=True)
    row_T = per_token(lambda prefix, _: ROW[prefix]).long()
    logprobs_T = torch.log_softmax(logits, -1)[row_T, packed.target_ids_T]
    # the loss is proportional to the advantages: with probability times reward its sum is the expectation
    weighted = [sampled_probability(sequence, versions) * REWARDS[sequence] for sequence in SEQUENCES]
    columns = {
        "advantages": torch.tensor(weighted, dtype=torch.double).repeat_interleave(LENGTH + 1),
        "old_logprobs": logprobs_T.detach(),
    }
    sampled_T = per_token(lambda prefix, token: math.log(probability(prefix, token, versions(prefix))))
    packed = replace(packed, rollout_logprobs_T=sampled_T, columns=columns)
    count = Denominators(num_tokens=1, num_sequences=1)
    batch = LossBatch(pack=packed, denominators=count, sequences=Sequences.of(packed.cu_seqlens_S))
    loss = PolicyLoss(token_loss=ClippedLoss.of(config), algorithm=config, length_norm=1)
    loss(TokenScores(logprobs_T=logprobs_T, entropy_T=torch.zeros_like(logprobs_T)), batch).loss.backward()
    assert logits.grad is not None
    return -np.asarray(logits.grad)


def value(prefix: Prefix, versions: Versions) -> float:
    """Return the expected reward after a prefix."""
    if len(prefix) == LENGTH:
        return float(REWARDS[prefix])
    return sum(probability(prefix, a, versions(prefix)) * value((*prefix, a), versions) for a in range(VOCABULARY))


def gradient_by_recursion(versions: Versions, weight: Callable[[float, float], float]) -> np.ndarray:
    """Return the sum over prefixes and tokens of weight * Q * d log pi, each times the probability of the prefix.

    Q is the expected reward after the token, d log pi the gradient of its log-probability in the last version.
    `weight` depends on the probabilities of a token in the last version, and in the version that samples it.
    """
    gradient = np.zeros_like(LOGITS[CURRENT])
    for prefix in PREFIXES:
        reached = np.prod([probability(before, token, versions(before)) for before, token in steps(prefix)])
        row = PROBABILITIES[CURRENT, ROW[prefix]]
        for token in range(VOCABULARY):
            share = weight(row[token], probability(prefix, token, versions(prefix)))
            d_log = np.eye(VOCABULARY)[token] - row
            gradient[ROW[prefix]] += reached * share * value((*prefix, token), versions) * d_log
    return gradient


def expected_reward_gradient(versions: Versions, *, is_trained: Callable[[Prefix], bool]) -> np.ndarray:
    """Return the derivative of the expected reward for the logits of the last version.

    It samples the token after a prefix that `is_trained`; tokens after others are of the version that sampled them.
    """
    logits = torch.tensor(LOGITS[CURRENT], requires_grad=True)
    policy = torch.softmax(logits, -1)
    total = 0 * logits.sum()
    for sequence in SEQUENCES:
        term = torch.tensor(REWARDS[sequence])
        for prefix, token in steps(sequence):
            trained = is_trained(prefix)
            term = term * (policy[ROW[prefix], token] if trained else probability(prefix, token, versions(prefix)))
        total = total + term
    total.backward()
    assert logits.grad is not None
    return np.asarray(logits.grad)


@cache
def on_policy_gradient() -> np.ndarray:
    return gradient_by_recursion(by_position(*[CURRENT] * LENGTH), lambda new, _: new)


def distance(gradient: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(gradient - other).max())


def corrected(kind: str, high: float = 1e8) -> dict[str, Any]:
    return {"rollout_is": RolloutIsConfig(kind=kind, high=high)}


def test_the_references_agree_with_each_other() -> None:
    by_derivative = expected_reward_gradient(by_position(0, 0, 0), is_trained=lambda _: True)
    assert distance(on_policy_gradient(), by_derivative) <= 1e-12
    assert np.abs(by_derivative).max() > 0.01


@pytest.mark.parametrize("switch", SWITCHES)
def test_weights_of_sequences_give_the_gradient_on_policy(switch: str) -> None:
    assert distance(expected_gradient(SWITCHES[switch], **corrected("sequence_tis")), on_policy_gradient()) <= TOLERANCE


@pytest.mark.parametrize("switch", STALE)
def test_without_a_correction_the_gradient_differs(switch: str) -> None:
    """The tests of this module can fail: older versions matter. The gradient lacks the probability ratios."""
    got = expected_gradient(SWITCHES[switch], rollout_is=None)
    assert distance(got, on_policy_gradient()) > 100 * TOLERANCE
    assert distance(got, gradient_by_recursion(SWITCHES[switch], lambda _, old: old)) <= TOLERANCE


@pytest.mark.parametrize("algorithm", [corrected("token_tis"), {"decoupled": DecoupledConfig()}], ids=str)
@pytest.mark.parametrize("switch", SWITCHES)
def test_weights_of_tokens_give_the_gradient_of_one_token_at_a_time(switch: str, algorithm: dict[str, Any]) -> None:
    """The sum of the derivatives of rewards where the last version samples one token, older ones the others."""
    versions = SWITCHES[switch]
    expected = sum(
        expected_reward_gradient(versions, is_trained=lambda prefix, at=position: len(prefix) == at)
        for position in range(LENGTH)
    )
    assert distance(expected_gradient(versions, **algorithm), expected) <= TOLERANCE


@pytest.mark.parametrize("high", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("switch", SWITCHES)
def test_bias_of_truncated_weights_of_tokens(switch: str, high: float) -> None:
    """What is above `high` times the probability of the version that sampled the token is missing."""
    versions = SWITCHES[switch]
    truncated = expected_gradient(versions, **corrected("token_tis", high))
    bias = truncated - expected_gradient(versions, **corrected("token_tis"))
    missing = gradient_by_recursion(versions, lambda new, old: max(0.0, new - high * old))
    assert distance(bias, -missing) <= TOLERANCE
    decoupled = expected_gradient(versions, decoupled=DecoupledConfig(behave_cap=high))
    assert distance(decoupled, truncated) <= 1e-12
    assert np.abs(bias).max() > 100 * TOLERANCE or not switch.startswith("0")


@pytest.mark.parametrize("switch", SWITCHES)
def test_bias_of_truncated_weights_of_sequences(switch: str) -> None:
    versions, high = SWITCHES[switch], 2.0
    last = by_position(*[CURRENT] * LENGTH)
    missing = np.zeros_like(LOGITS[CURRENT])
    for sequence in SEQUENCES:
        above = max(0.0, sampled_probability(sequence, last) - high * sampled_probability(sequence, versions))
        for prefix, token in steps(sequence):
            row = PROBABILITIES[CURRENT, ROW[prefix]]
            missing[ROW[prefix]] += above * REWARDS[sequence] * (np.eye(VOCABULARY)[token] - row)
    got = expected_gradient(versions, **corrected("sequence_tis", high))
    assert distance(got, on_policy_gradient() - missing) <= TOLERANCE


@pytest.mark.parametrize("oldest", [1, CURRENT])
@pytest.mark.parametrize("switch", SWITCHES)
def test_without_tokens_above_the_cap_the_gradient_is_that_of_the_others(switch: str, oldest: int) -> None:
    """The derivative of the reward where the masked tokens are a fixed part of the environment."""
    versions = SWITCHES[switch]

    def is_kept(prefix: Prefix) -> bool:
        return versions(prefix) >= oldest

    got = expected_gradient(versions, oldest=oldest, **corrected("sequence_tis"))
    assert distance(got, expected_reward_gradient(versions, is_trained=is_kept)) <= TOLERANCE
    of_tokens = expected_gradient(versions, oldest=oldest, **corrected("token_tis", 1.3))
    kept = np.array([[is_kept(prefix)] for prefix in PREFIXES])
    assert distance(of_tokens, kept * expected_gradient(versions, **corrected("token_tis", 1.3))) <= 1e-12
