"""What Megatron ranks compute of a saved model under a layout, in Hugging Face terms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.batch.trajectory import Trajectory
from megarl.config.trainer import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.functional.losses import Denominators
from megarl.megatron.requests import MiniBatch, ModelSpec, SampleRef, TrainerSpec, TrainWork, split_by_dp
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import LocalPayload
from tests.megatron.fidelity.reference import Tokens
from tests.megatron.ranks import run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    logprobs: dict[int, torch.Tensor]
    """By sequence, [T - 1]."""
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
    **parallel: Any,
) -> Measured:
    """One training step on the mean negative log-likelihood of `sequences`, on `world` gloo ranks."""
    spec = ModelSpec(
        model_path=folder,
        dtype=dtype,
        parallel=ParallelConfig(**parallel),
        recompute=RecomputeConfig(**(recompute or {})),
    )
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=1.0, distributed=distributed)
    return run_ranks(_on_rank, world, tmp_path, spec, optimizer, sequences, max_tokens)


def score_on_ranks(
    folder: str, sequences: Tokens, tmp_path: Path, *, world: int = 1, max_tokens: int = 256, **parallel: Any
) -> dict[int, torch.Tensor]:
    """Log-probabilities by sequence, [T - 1]; nothing is trained."""
    spec = ModelSpec(model_path=folder, dtype="float32", parallel=ParallelConfig(**parallel))
    return run_ranks(_score, world, tmp_path, spec, sequences, max_tokens)


def _score(spec: ModelSpec, sequences: Tokens, max_tokens: int) -> dict[int, torch.Tensor]:
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import ModelRank

    rank = ModelRank(spec)
    grid = RankGrid.of(spec.parallel, dist.get_world_size())
    scores = _scores(rank, split_by_dp(nll_work(sequences, max_tokens), grid)[dist.get_rank()])
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, scores)
    return {i: logprobs for each in everything for i, (logprobs, _) in each.items()}


def _scores(rank: Any, work: TrainWork) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    (batch,), (payload,) = work.mini_batches, work.payloads
    trajectories = payload.fetch()
    scored = rank.score([[trajectories[i] for i in micro_batch] for micro_batch in batch.micro_batches])
    return {
        i: scores
        for micro_batch, of in zip(batch.micro_batches, scored, strict=False)
        for i, scores in zip(micro_batch, of, strict=True)
    }


def _on_rank(spec: ModelSpec, optimizer: OptimizerConfig, sequences: Tokens, max_tokens: int) -> Measured | None:
    import torch.distributed as dist

    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.training.trainer import MegatronTrainer

    trainer = MegatronTrainer(TrainerSpec(model=spec, optimizer=optimizer, optimizer_steps=1))
    grid = RankGrid.of(spec.parallel, dist.get_world_size())
    work = split_by_dp(nll_work(sequences, max_tokens), grid)[dist.get_rank()]
    scores = _scores(trainer.rank, work)
    gradients: dict[str, torch.Tensor] = {}
    prepare = trainer._optimizer.prepare_grads

    def keep_gradients_then_prepare() -> Any:
        gradients.update(collect_gradients(trainer))
        return prepare()

    trainer._optimizer.prepare_grads = keep_gradients_then_prepare
    stats = trainer.train_step(work)
    mine = (scores, stats.metrics, trainer.rank.layout, gradients, trainer.rank.tensors())
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    if dist.get_rank() != 0:
        return None
    layouts = [each[2] for each in everything]
    metrics = everything[grid.output_rank(0)][1]
    together = {i: of for each in everything for i, of in each[0].items()}
    return Measured(
        logprobs={i: logprobs for i, (logprobs, _) in together.items()},
        entropies={i: entropies for i, (_, entropies) in together.items()},
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        gradients=assemble(layouts, [each[3] for each in everything]),
        weights=assemble(layouts, [each[4] for each in everything]),
    )


def collect_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's gradients under the names of its layout."""
    rank = trainer.rank
    of = {parameter.data_ptr(): parameter for chunk in rank.chunks for parameter in chunk.module.parameters()}
    held = {name: of.get(tensor.data_ptr()) for name, tensor in rank.tensors().items()}
    return {name: parameter.main_grad.clone() for name, parameter in held.items() if parameter is not None}


def assemble(layouts: list[Any], held: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole Hugging Face tensors from every rank's shards; ranks that hold the same must agree to a rounding."""
    whole: dict[str, torch.Tensor] = {}
    for layout, tensors in zip(layouts, held, strict=True):
        for piece in layout.pieces:
            if piece.local not in tensors:
                continue
            local = tensors[piece.local][tuple(slice(*b) for b in piece.local_box)]
            full = whole.setdefault(piece.tensor, torch.full(layout.tensors[piece.tensor].shape, torch.nan).to(local))
            target = full[tuple(slice(*b) for b in piece.box)]
            if not target.isnan().any():
                assert torch.allclose(local, target, rtol=1e-5, atol=1e-6), f"ranks disagree about {piece.tensor}"
            target.copy_(local)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return whole


def nll_work(sequences: Tokens, max_tokens: int) -> TrainWork:
    """Mean negative log-likelihood of all tokens but first ones."""
    trajectories = [as_trajectory(tokens) for tokens in sequences]
    samples = tuple(SampleRef(payload=0, index=i, num_tokens=len(tokens)) for i, tokens in enumerate(sequences))
    count = Denominators(num_tokens=sum(len(s) - 1 for s in sequences), num_sequences=len(sequences))
    return TrainWork(
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
    """The largest |difference| relative to the tensor's largest gradient, and which tensor's."""
    assert set(want) <= set(got), sorted(set(want) - set(got))[:5]
    return max(
        (float((got[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-8)), name) for name, grad in want.items()
    )
