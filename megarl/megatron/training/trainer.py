"""One Megatron rank that trains: model, optimizer, and the steps they take. All ranks call every method together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megarl.config.trainer import OptimizerConfig
from megarl.functional import Denominators
from megarl.megatron.checkpoint.training_state import TrainCheckpoint
from megarl.megatron.modeling.megatron_model import LocalPack, ModelRank
from megarl.megatron.requests import MISMATCH, Loss, MiniBatch, SurrogateLoss, TrainerSpec, TrainStats, TrainWork
from megarl.megatron.runtime.offload import TrainerMemory
from megarl.megatron.training.loss import Objective, mismatch
from megarl.megatron.training.metric_sums import MetricSums
from megarl.megatron.training.samples import Samples
from megarl.megatron.training.update_guard import StepWatch


class MegatronTrainer:
    """Holds this rank's shards; see `TrainerWorker` for what the controller may call."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.rank = rank = ModelRank(spec.model)
        rank.config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=rank.groups)
        self._ddp = _distribute(rank, spec.optimizer.distributed)
        self._optimizer = _make_optimizer(spec.optimizer, self._ddp, rank)
        self._scheduler = _make_scheduler(spec.optimizer, self._optimizer, spec.optimizer_steps)
        self.memory = TrainerMemory(rank, self._ddp, self._optimizer)
        self.checkpoint = TrainCheckpoint(rank, self._optimizer, self._scheduler, self.memory)

    def train_step(self, work: TrainWork) -> TrainStats:
        """All mini-batches of the work, one optimizer step each, as often as `epochs` says."""
        self.memory.onload()
        samples = Samples.fetch(work)
        metrics = MetricSums()
        batches = [self._packs(batch, work, samples, metrics) for batch in work.mini_batches]
        watch = StepWatch(work, samples, self.rank)
        if watch.allows_step(metrics.largest_here(MISMATCH)):
            for _ in range(work.epochs):
                for batch, packs in zip(work.mini_batches, batches, strict=True):
                    learning_rate = self._learning_rate
                    metrics = self._try_update(batch, packs, work.loss, metrics, watch)
        else:
            learning_rate = self._learning_rate
            self._scheduler.step(increment=work.epochs * len(batches))
        reduced = metrics.reduce(self.rank.groups.dp_cp) if self.rank.is_last else {}
        # what holds before the first update is measured once a mini-batch
        times = {name: len(batches) if name.startswith("mismatch/") else watch.updates for name in reduced}
        out = {name: v if name.endswith("_max") else v / times[name] for name, v in reduced.items()}
        out |= {**watch.metrics(), "learning_rate": learning_rate}
        tokens = sum(s.num_tokens for b in work.mini_batches for s in b.samples)
        return TrainStats(metrics=out, num_tokens=tokens)

    def _packs(self, batch: MiniBatch, work: TrainWork, samples: Samples, metrics: MetricSums) -> list[LocalPack]:
        """The mini-batch's, with everything that the loss asks of its tokens."""
        packs = []
        for micro_batch in batch.micro_batches:
            refs = [batch.samples[i] for i in micro_batch]
            columns = {name: [samples.column(name, ref) for ref in refs] for name in samples.names(batch)}
            packs.append(self.rank.pack([samples.trajectory(ref) for ref in refs], columns))
        if isinstance(work.loss, SurrogateLoss):
            if "old_logprobs" not in work.columns:
                packs = self._with_old_logprobs(packs)
            for packed in packs if self.rank.is_last else ():
                mismatch(packed.batch, batch.denominators.num_tokens, metrics)
        return packs

    def _with_old_logprobs(self, packs: list[LocalPack]) -> list[LocalPack]:
        """The policy's log-probabilities before this step's first update, which the last stage alone has and needs."""
        found = self.rank.logprobs(packs)
        if not self.rank.is_last:
            return packs
        return [
            replace(packed, batch=packed.batch.with_column("old_logprobs", logprobs_t))
            for packed, logprobs_t in zip(packs, found, strict=True)
        ]

    @property
    def _learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _try_update(
        self, batch: MiniBatch, packs: Sequence[LocalPack], loss: Loss, metrics: MetricSums, watch: StepWatch
    ) -> MetricSums:
        """What `metrics` are after the update; as they were, and all else with them, where `watch` refuses it."""
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        tried = metrics.copy()
        losses = self._accumulate(packs, loss, batch.denominators, tried)
        # what megatron-core's `step` does, with a question between the norm and the rest
        self._optimizer.prepare_grads()
        grad_norm = self._optimizer.get_grad_norm()
        allowed = watch.allows_update(batch, losses, grad_norm)
        if allowed:
            _clip(self._optimizer, grad_norm)
            self._optimizer.step_with_ready_grads()
        self._scheduler.step(increment=1)
        return tried if allowed else metrics

    def _accumulate(
        self, packs: Sequence[LocalPack], loss: Loss, denominators: Denominators, metrics: MetricSums
    ) -> list[Tensor]:
        """Leave the mini-batch's gradient, reduced over all ranks, in the gradient buffers.

        Returns:
            This rank's share of each micro-batch's loss; empty on all stages but the last.
        """
        objective = Objective(loss, denominators, self.rank.groups)
        # megatron-core multiplies by the context-parallel size, and DDP averages over the data- and context-parallel
        # ranks; the objective's denominators are global already, so both are undone here.
        scale = self.rank.groups.dp.size()

        def share(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            value = objective(logits_1tv[0], packed.batch, metrics)
            return value * scale, {"loss": value.detach()}

        return [output["loss"] for output in self.rank.run(packs, share, modules=self._ddp)]


def _distribute(rank: ModelRank, distributed_optimizer: bool) -> list[DistributedDataParallel]:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    return [
        DistributedDataParallel(rank.config, settings, chunk.module, pg_collection=rank.groups) for chunk in rank.chunks
    ]


def _clip(optimizer: ChainedOptimizer, grad_norm: float) -> None:
    """Scale gradients down to the norm that they are clipped at, as `ChainedOptimizer.step` does."""
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )


def _make_optimizer(
    config: OptimizerConfig, chunks: list[DistributedDataParallel], rank: ModelRank
) -> ChainedOptimizer:
    settings = McoreOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=config.distributed,
        bf16=rank.dtype == torch.bfloat16,
        params_dtype=rank.dtype,
    )
    optimizer = get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False, pg_collection=rank.groups)
    assert isinstance(optimizer, ChainedOptimizer), type(optimizer)
    return optimizer


def _make_scheduler(config: OptimizerConfig, optimizer: Any, steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr if config.decay != "constant" else config.lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(steps, config.warmup_steps + 1),
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
