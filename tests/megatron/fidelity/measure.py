"""Runs Megatron ranks on a saved model in a given parallel layout; returns results under Hugging Face names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch.pack import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import OptimizerConfig, RecomputeConfig
from megarl.functional.losses import Denominators
from megarl.losses import ValueLoss
from megarl.megatron.request_samples import StepSamples
from megarl.megatron.requests import MiniBatch, ModelSpec, TrainerSpec, TrainRequest
from tests.megatron import rank_models
from tests.megatron.fidelity.reference import Tokens, draw_returns
from tests.megatron.rank_models import gather, gather_full, make_model, make_trainer, model_spec, own_part, train_step
from tests.megatron.ranks import run_ranks

TOLERANCE = 1e-5

Scores = dict[int, torch.Tensor]
"""By sequence index: log-probabilities and entropies, float32 [2, T - 1], or of a value model the values [1, T]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    scores: Scores
    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """After the optimizer step."""

    @property
    def token_scores(self) -> dict[int, torch.Tensor]:
        """By sequence index: log-probabilities, float32 [T - 1], or values [T]."""
        return {i: of[0] for i, of in self.scores.items()}


def measure(
    folder: str,
    sequences: Tokens,
    tmp_path: Path,
    *,
    world: int = 1,
    max_tokens: int = 256,
    dtype: str = "float32",
    head: str = "lm",
    recompute: dict[str, Any] | None = None,
    device: str = "cpu",
    fused_lm_head: bool | None = None,
    fp32_lm_head: bool = False,
    megatron: MegatronConfig | None = None,
    **parallel: Any,
) -> Measured:
    """Run one step on `world` ranks of `device`.

    Its loss is the mean negative log-likelihood of `sequences`, or that of `differentiate_values` for a value model.
    """
    fields = {"dtype": dtype, "head": head, "fused_lm_head": fused_lm_head, "fp32_lm_head": fp32_lm_head}
    fields |= {"recompute": RecomputeConfig(**(recompute or {})), "megatron": megatron or MegatronConfig()}
    spec = model_spec(folder, parallel, **fields)
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=1.0, distributed=False)
    return run_ranks(_on_rank, world, tmp_path, spec, optimizer, sequences, max_tokens, device=device)


def score_on_ranks(
    folder: str, sequences: Tokens, tmp_path: Path, *, world: int = 1, max_tokens: int = 256, **parallel: Any
) -> Scores:
    """Return the scores of sequences without training."""
    return run_ranks(_score_on_rank, world, tmp_path, model_spec(folder, parallel), sequences, max_tokens)


def _score_on_rank(spec: ModelSpec, sequences: Tokens, max_tokens: int) -> Scores:
    model = make_model(spec)
    return _score(model, own_part(model, nll_request(sequences, max_tokens)))


def _score(model: Any, request: TrainRequest) -> Scores:
    """Return the scores of all sequences: those of all ranks of a replica are bitwise the same."""
    from megarl.losses import token_values

    (batch,), samples = request.mini_batches, StepSamples.fetch(request)
    refs = [[batch.samples[i] for i in indices] for indices in batch.micro_batches]
    trajectories = [[samples.trajectory(ref) for ref in of] for of in refs]
    if model.spec.head == "value":
        scored = model.forward_sequences(trajectories, lambda output: token_values(output)[None])
    else:
        scored = [[torch.stack(scores) for scores in of] for of in model.score(trajectories)]
    own = {
        ref.index: scores
        for of, batch_scores in zip(refs, scored, strict=False)
        for ref, scores in zip(of, batch_scores, strict=True)
    }
    merged: Scores = {}
    for each in gather(own):
        for i, scores in each.items():
            assert torch.equal(merged.setdefault(i, scores), scores), f"ranks disagree about sequence {i}"
    return merged


def _on_rank(spec: ModelSpec, optimizer: OptimizerConfig, sequences: Tokens, max_tokens: int) -> Measured:
    trainer = make_trainer(TrainerSpec(model=spec, optimizer=optimizer, optimizer_steps=1))
    request = nll_request(sequences, max_tokens) if spec.head == "lm" else value_request(sequences, max_tokens)
    scores, recorded = _score(trainer.model, own_part(trainer.model, request)), rank_models.record_gradients(trainer)
    metrics = train_step(trainer, request)
    return Measured(
        scores=scores,
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        gradients=gather_full(trainer.model, recorded[0]),
        weights=gather_full(trainer.model, trainer.model.tensors()),
    )


def nll_request(sequences: Tokens, max_tokens: int) -> TrainRequest:
    """Request one SFT step on all tokens except the first of each sequence."""
    trajectories = [as_trajectory(tokens) for tokens in sequences]
    samples = tuple(SampleRef(payload=0, index=i, num_tokens=len(tokens)) for i, tokens in enumerate(sequences))
    count = Denominators(num_tokens=sum(len(s) - 1 for s in sequences), num_sequences=len(sequences))
    return TrainRequest(
        mini_batches=(MiniBatch(samples=samples, denominators=count),),
        payloads=(LocalPayload(trajectories),),
        max_tokens_per_micro_batch=max_tokens,
    )


def value_request(sequences: Tokens, max_tokens: int) -> TrainRequest:
    """Request one step of a critic on all tokens except the first of each sequence."""
    returns = draw_returns(sequences)
    columns = {"values": [np.zeros_like(of) for of in returns], "returns": returns}
    return replace(
        nll_request(sequences, max_tokens),
        loss=ValueLoss(clip=None),
        columns={name: LocalPayload([{(0, i): of for i, of in enumerate(all_of)}]) for name, all_of in columns.items()},
    )


def as_trajectory(
    tokens: Sequence[int], mask: np.ndarray | None = None, *, number: int = 0, logprob: float = 0.0
) -> Trajectory:
    """Return a trajectory; all tokens except the first are sampled unless `mask` [T] says which."""
    mask = np.arange(len(tokens)) > 0 if mask is None else mask
    return Trajectory(
        prompt_id=str(number),
        group_id=number,
        token_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def worst_gradient(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest |difference| relative to the tensor's largest gradient, and the tensor's name."""
    assert set(want) <= set(got), sorted(set(want) - set(got))[:5]
    return max(
        (float((got[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-8)), name) for name, grad in want.items()
    )


def assert_same_gradients(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    """Check that all gradients are equal, relative to the largest of their tensor."""
    assert got.keys() == want.keys()
    difference, tensor = worst_gradient(got, want)
    assert difference <= tolerance, (tensor, difference)


def assert_same(got: Measured, want: Measured) -> None:
    """Check that scores, loss and gradients are equal up to rounding."""
    assert got.scores.keys() == want.scores.keys()
    for i, scores in want.scores.items():
        torch.testing.assert_close(got.scores[i], scores, rtol=0, atol=TOLERANCE)
    assert got.loss == pytest.approx(want.loss, rel=TOLERANCE)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients)


def gradient_norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
