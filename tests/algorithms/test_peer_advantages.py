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
from megarl.config.algorithms.algorithm import AlgorithmConfig
from megarl.functional import normalize, whiten
from megarl.groups.estimation.estimators import EstimatorOutput, TokenBatch

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


def algorithm(kind: str, preset: str, **given: Any) -> Any:
    return TypeAdapter[Any](AlgorithmConfig).validate_python({"type": kind, "preset": preset, **given})


def assert_equal(got: Tensor, name: str) -> None:
    np.testing.assert_allclose(got.numpy(), packed(name).numpy(), rtol=2e-5, atol=2e-6)


def whitened(out: EstimatorOutput) -> Tensor:
    """Return the advantages as they are once the rollout workers have whitened them."""
    advantages_T, whitening = out.columns["advantages"], out.whitening
    assert whitening is not None
    mask_T = torch.ones(len(advantages_T), dtype=torch.bool)
    return normalize(advantages_T, mask_T, mean=whitening.mean, variance=whitening.variance)


PENALTY = {"kl_reward": {"kind": "k1", "coefficient": 1.0}}


def test_ppo_of_verl() -> None:
    config = algorithm("ppo", "compat:verl", gamma=PEER["gamma"], lam=PEER["lam"], **PENALTY)
    out = ppo_estimates(token_batch(penalty=True), config, 1.0)
    assert_equal(whitened(out), "verl.compute_gae_advantage_return")


def test_reinforce_pp_of_verl() -> None:
    config = algorithm("reinforce_pp", "compat:verl", **PENALTY)
    out = reinforce_estimates(token_batch(penalty=True), config, 1.0)
    assert_equal(whitened(out), "verl.compute_reinforce_plus_plus_outcome_advantage")


@pytest.mark.parametrize("preset", ["compat:verl", "compat:slime"])
def test_reinforce_pp_baseline(preset: str) -> None:
    out = reinforce_estimates(token_batch(), algorithm("reinforce_pp_baseline", preset), 0.0)
    assert_equal(whitened(out), "verl.compute_reinforce_plus_plus_baseline_outcome_advantage")


def test_whitening_of_slime() -> None:
    values_T = packed("values")
    assert_equal(
        whiten(values_T, torch.ones(len(values_T), dtype=torch.bool), unbiased=True), "slime.distributed_masked_whiten"
    )


def test_prime_of_its_authors() -> None:
    out = prime_estimates(token_batch(), algorithm("prime", "paper"))
    assert_equal(whitened(out), "verl.prime.compute_rloo_advantage_return")
    raw = prime_estimates(token_batch(), algorithm("prime", "paper", whiten=False))
    assert_equal(raw.columns["advantages"], "verl.prime.returns")
