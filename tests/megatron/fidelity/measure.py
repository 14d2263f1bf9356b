"""Runs Megatron ranks on a saved model in a given parallel layout; returns results under Hugging Face names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.batch.sample_table import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.config.trainer import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.functional.losses import Denominators
from megarl.megatron.request_split import split_by_dp
from megarl.megatron.requests import MiniBatch, ModelSpec, TrainerSpec, TrainRequest
from megarl.megatron.training.samples import StepSamples
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import LocalPayload
from tests.megatron.fidelity.reference import Tokens
from tests.megatron.ranks import run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    logprobs: dict[int, torch.Tensor]
    """By sequence index, float32 [T - 1]."""
    entropies: dict[int, torch.Tensor]
    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """After the optimizer step."""


def measure(
    folder: str,
    sequences: Tokens,
    tmp_path: Path,
    *,
    world: int = 1,
    max_tokens: int = 256,
    dtype: str = "float32",
    recompute: dict[str, Any] | None = None,
    distributed: bool = False,
    device: str = "cpu",
    fused_lm_head: bool | None = None,
    **parallel: Any,
) -> Measured:
    """Run one SFT step (mean negative log-likelihood of `sequences`) on `world` ranks of `device`."""
    spec = ModelSpec(
        model_path=folder,
        dtype=dtype,
        parallel=ParallelConfig(**parallel),
        recompute=RecomputeConfig(**(recompute or {})),
        fused_lm_head=fused_lm_head,
    )
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=1.0, distributed=distributed)
    return run_ranks(_on_rank, world, tmp_path, spec, optimizer, sequences, max_tokens, device=device)


def score_on_ranks(
    folder: str, sequences: Tokens, tmp_path: Path, *, world: int = 1, max_tokens: int = 256, **parallel: Any
) -> dict[int, torch.Tensor]:
    """Return log-probabilities by sequence index, float32 [T - 1], without training."""
    spec = ModelSpec(model_path=folder, dtype="float32", parallel=ParallelConfig(**parallel))
    return run_ranks(_score, world, tmp_path, spec, sequences, max_tokens)


def _score(spec: ModelSpec, sequences: Tokens, max_tokens: int) -> dict[int, torch.Tensor]:
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import MegatronModel

    model = MegatronModel(spec)
    grid = RankGrid.of(spec.parallel, dist.get_world_size())
    scores = _scores(model, split_by_dp(nll_request(sequences, max_tokens), grid)[dist.get_rank()])
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, scores)
    return {i: logprobs for each in gathered for i, (logprobs, _) in each.items()}


def _scores(model: Any, request: TrainRequest) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    (batch,), samples = request.mini_batches, StepSamples.fetch(request)
    micro_batches = [[batch.samples[i] for i in indices] for indices in batch.micro_batches]
    scored = model.score([[samples.trajectory(ref) for ref in refs] for refs in micro_batches])
    return {
        ref.index: scores
        for refs, of in zip(micro_batches, scored, strict=False)
        for ref, scores in zip(refs, of, strict=True)
    }


def _on_rank(spec: ModelSpec, optimizer: OptimizerConfig, sequences: Tokens, max_tokens: int) -> Measured | None:
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.training.trainer import MegatronTrainer

    trainer = MegatronTrainer(TrainerSpec(model=spec, optimizer=optimizer, optimizer_steps=1))
    grid = RankGrid.of(spec.parallel, dist.get_world_size())
    request = split_by_dp(nll_request(sequences, max_tokens), grid)[dist.get_rank()]
    scores = _scores(trainer.model, request)
    gradients: dict[str, torch.Tensor] = {}
    prepare = trainer._optimizer.prepare_grads

    def keep_gradients_then_prepare() -> Any:
        gradients.update(collect_gradients(trainer))
        return prepare()

    trainer._optimizer.prepare_grads = keep_gradients_then_prepare
    stats = trainer.train_step(request)
    mine = (scores, stats.metrics, trainer.model.layout, gradients, trainer.model.tensors())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if dist.get_rank() != 0:
        return None
    layouts = [each[2] for each in gathered]
    metrics = gathered[grid.output_rank(0)][1]
    merged = {i: of for each in gathered for i, of in each[0].items()}
    return Measured(
        logprobs={i: logprobs for i, (logprobs, _) in merged.items()},
        entropies={i: entropies for i, (_, entropies) in merged.items()},
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        gradients=assemble(layouts, [each[3] for each in gathered]),
        weights=assemble(layouts, [each[4] for each in gathered]),
    )


def collect_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's gradients under the local names of its layout."""
    model = trainer.model
    of = {parameter.data_ptr(): parameter for chunk in model.chunks for parameter in chunk.module.parameters()}
    rank_tensors = {name: of.get(tensor.data_ptr()) for name, tensor in model.tensors().items()}
    return {name: parameter.main_grad.clone() for name, parameter in rank_tensors.items() if parameter is not None}


def assemble(layouts: list[Any], rank_tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Assemble full Hugging Face tensors from the shards of all ranks; replicas must be equal up to rounding."""
    full_tensors: dict[str, torch.Tensor] = {}
    for layout, tensors in zip(layouts, rank_tensors, strict=True):
        for piece in layout.pieces:
            if piece.local not in tensors:
                continue
            local = tensors[piece.local][tuple(slice(*b) for b in piece.local_box)]
            full = full_tensors.setdefault(
                piece.tensor, torch.full(layout.tensors[piece.tensor].shape, torch.nan).to(local)
            )
            target = full[tuple(slice(*b) for b in piece.box)]
            if not target.isnan().any():
                assert torch.allclose(local, target, rtol=1e-5, atol=1e-6), f"ranks disagree about {piece.tensor}"
            target.copy_(local)
    for name, tensor in full_tensors.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return full_tensors


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


def as_trajectory(tokens: tuple[int, ...]) -> Trajectory:
    n = len(tokens)
    mask = np.arange(n) > 0
    return Trajectory(
        prompt_id="",
        group_id=0,
        token_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def worst_gradient(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest |difference| relative to the tensor's largest gradient, and the tensor's name."""
    assert set(want) <= set(got), sorted(set(want) - set(got))[:5]
    return max(
        (float((got[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-8)), name) for name, grad in want.items()
    )
