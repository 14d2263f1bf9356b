"""Advantages of presets against the numbers that the functions of verl and slime return for the same inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from megarl.algorithms.ppo import ppo_estimates
from megarl.algorithms.prime import prime_estimates
from megarl.algorithms.reinforce import reinforce_estimates
from megarl.config.algorithm import AlgorithmConfig
from megarl.functional import normalize, whiten
from megarl.rollout.estimation.estimators import EstimatorOutput, TokenBatch

PEER = json.loads((Path(__file__).parent / "peer_advantages.json").read_text())


def packed(name: str) -> Tensor:
    """Return the values per token, [T], which the file has as a list for each completion."""
    return torch.tensor([value for completion in PEER[name] for value in completion])


def token_batch(*, penalty: bool = False) -> TokenBatch:
    """Return the completions; `penalty`: their policy differs from the reference by the file's penalties."""
    lengths = torch.tensor([len(completion) for completion in PEER["values"]])
    zeros_T = torch.zeros(int(lengths.sum()))
    return TokenBatch(
        mask_T=torch.ones(len(zeros_T), dtype=torch.bool),
        cu_seqlens_N=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        rewards_N=torch.tensor(PEER["rewards"]),
        group_ids_N=torch.tensor(PEER["groups"]),
        columns={
            "values": packed("values"),
            "old_logprobs": packed("penalties") if penalty else zeros_T,
            "ref_logprobs": zeros_T,
            "reward_logprobs": packed("log_ratios"),
        },
    )


def assert_equal(got: Tensor, name: str) -> None:
    np.testing.assert_allclose(got.numpy(), packed(name).numpy(), rtol=2e-5, atol=2e-6)


def whitened(out: EstimatorOutput) -> Tensor:
    """Return the advantages as they are once the rollout workers have whitened them."""
    advantages_T, whitening = out.columns["advantages"], out.whitening
    assert whitening is not None
    mask_T = torch.ones(len(advantages_T), dtype=torch.bool)
    return normalize(advantages_T, mask_T, mean=whitening.mean, variance=whitening.variance)


PENALTY = {"kl_reward": {"kind": "k1", "coefficient": 1.0}}
REWARD_TO_GO = {"gamma": PEER["gamma"], "lam": PEER["lam"]}
BASELINE = "verl.compute_reinforce_plus_plus_baseline_outcome_advantage"


@pytest.mark.parametrize(
    ("estimator", "preset", "section", "expected"),
    [
        (ppo_estimates, "compat:verl", {"type": "ppo"} | REWARD_TO_GO | PENALTY, "verl.compute_gae_advantage_return"),
        (
            *(reinforce_estimates, "compat:verl", {"type": "reinforce_pp", **PENALTY}),
            "verl.compute_reinforce_plus_plus_outcome_advantage",
        ),
        (reinforce_estimates, "compat:verl", {"type": "reinforce_pp_baseline"}, BASELINE),
        (reinforce_estimates, "compat:slime", {"type": "reinforce_pp_baseline"}, BASELINE),
        (prime_estimates, "paper", {"type": "prime"}, "verl.prime.compute_rloo_advantage_return"),
        (prime_estimates, "paper", {"type": "prime", "whiten": False}, "verl.prime.returns"),
    ],
)
def test_advantages_of_presets(estimator: Any, preset: str, section: dict[str, Any], expected: str) -> None:
    config = TypeAdapter[Any](AlgorithmConfig).validate_python({"preset": preset, **section})
    has_penalty = "kl_reward" in section
    coefficient = () if estimator is prime_estimates else (float(has_penalty),)
    out = estimator(token_batch(penalty=has_penalty), config, *coefficient)
    assert_equal(whitened(out) if section.get("whiten", True) else out.columns["advantages"], expected)


def test_whitening_of_slime() -> None:
    values_T = packed("values")
    got = whiten(values_T, torch.ones(len(values_T), dtype=torch.bool), unbiased=True)
    assert_equal(got, "slime.distributed_masked_whiten")
