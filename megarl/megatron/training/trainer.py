"""Training on one Megatron rank: model, optimizer, learning-rate schedule. All ranks call every method collectively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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
from megarl.megatron.losses.loss import AnyLoss
from megarl.megatron.modeling.megatron_model import LocalPack, MegatronModel
from megarl.megatron.requests import LOGPROB_MISMATCH, MiniBatch, TrainerSpec, TrainRequest, TrainStats
from megarl.megatron.runtime.offload import TrainerMemory
from megarl.megatron.training.loss import LossComputation, add_mismatch_metrics
from megarl.megatron.training.metric_sums import MetricSums
from megarl.megatron.training.samples import StepSamples
from megarl.megatron.training.update_guard import UpdateGuard


class MegatronTrainer:
    """This rank's shards of model, gradients and optimizer state, and the training step.

    `TrainerWorker` wraps it with the methods that the controller calls.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.model = model = MegatronModel(spec.model)
        model.config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=model.groups)
        self._ddp_chunks = _wrap_in_ddp(model, spec.optimizer.distributed)
        self._optimizer = _make_optimizer(spec.optimizer, self._ddp_chunks, model)
        self._scheduler = _make_scheduler(spec.optimizer, self._optimizer, spec.optimizer_steps)
        self.memory = TrainerMemory(model, self._ddp_chunks, self._optimizer)
        self.checkpoint = TrainCheckpoint(model, self._optimizer, self._scheduler, self.memory)

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Take one optimizer step per mini-batch, repeated `request.epochs` times, and return the reduced metrics."""
        self.memory.onload()
        samples = StepSamples.fetch(request)
        metrics = MetricSums()
        batches = [self._make_packs(batch, request, samples, metrics) for batch in request.mini_batches]
        guard = UpdateGuard(request, samples, self.model)
        if guard.allows_step(metrics.local_max(LOGPROB_MISMATCH)):
            for _ in range(request.epochs):
                for batch, packs in zip(request.mini_batches, batches, strict=True):
                    learning_rate = self._learning_rate
                    metrics = self._try_update(batch, packs, request.loss, metrics, guard)
        else:
            learning_rate = self._learning_rate
            self._scheduler.step(increment=request.epochs * len(batches))
        reduced = metrics.reduce(self.model.groups.dp_cp) if self.model.is_last_stage else {}
        # mismatch metrics are added once per mini-batch, all others once per update
        counts = {name: len(batches) if name.startswith("train_infer_mismatch/") else guard.updates for name in reduced}
        out = {name: v if name.endswith("_max") else v / counts[name] for name, v in reduced.items()}
        out |= {**guard.metrics(), "learning_rate": learning_rate}
        tokens = sum(s.num_tokens for b in request.mini_batches for s in b.samples)
        return TrainStats(metrics=out, num_tokens=tokens)

    def _make_packs(
        self, batch: MiniBatch, request: TrainRequest, samples: StepSamples, metrics: MetricSums
    ) -> list[LocalPack]:
        """Pack the mini-batch's micro-batches with all columns of the loss.

        For a loss that reads `old_logprobs`, that of a policy: computes the column if it is missing, and adds the
        metrics of its mismatch with the engines.
        """
        packs = []
        for micro_batch in batch.micro_batches:
            refs = [batch.samples[i] for i in micro_batch]
            columns = {name: [samples.column(name, ref) for ref in refs] for name in samples.column_names(batch)}
            packs.append(self.model.pack([samples.trajectory(ref) for ref in refs], columns))
        if "old_logprobs" in request.loss.columns:
            if "old_logprobs" not in request.columns:
                packs = self._with_old_logprobs(packs)
            for packed in packs if self.model.is_last_stage else ():
                add_mismatch_metrics(packed.batch, batch.denominators.num_tokens, metrics)
        return packs

    def _with_old_logprobs(self, packs: list[LocalPack]) -> list[LocalPack]:
        """Add the column `old_logprobs` [t], of the policy before the first update; only on the last pipeline stage."""
        old_logprobs = self.model.logprobs(packs)
        if not self.model.is_last_stage:
            return packs
        return [
            replace(packed, batch=packed.batch.with_column("old_logprobs", logprobs_t))
            for packed, logprobs_t in zip(packs, old_logprobs, strict=True)
        ]

    @property
    def _learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _try_update(
        self, batch: MiniBatch, packs: Sequence[LocalPack], loss: AnyLoss, metrics: MetricSums, guard: UpdateGuard
    ) -> MetricSums:
        """Compute the gradient of one mini-batch and update, unless `guard` rejects it.

        Returns:
            `metrics` with those of this update added, or unchanged if the update was rejected.
        """
        for chunk in self._ddp_chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        updated = metrics.copy()
        losses = self._accumulate_gradients(packs, loss, batch.denominators, updated)
        # the same calls as in megatron-core's `optimizer.step()`, with the guard between gradient norm and clipping
        self._optimizer.prepare_grads()
        grad_norm = self._optimizer.get_grad_norm()
        is_allowed = guard.allows_update(batch, losses, grad_norm)
        if is_allowed:
            _clip_gradients(self._optimizer, grad_norm)
            self._optimizer.step_with_ready_grads()
        self._scheduler.step(increment=1)
        return updated if is_allowed else metrics

    def _accumulate_gradients(
        self, packs: Sequence[LocalPack], loss: AnyLoss, denominators: Denominators, metrics: MetricSums
    ) -> list[Tensor]:
        """Run forward and backward; leaves the gradient, reduced over all ranks, in the DDP gradient buffers.

        Returns:
            This rank's share of the loss of each micro-batch, scalars; empty except on the last pipeline stage.
        """
        compute_loss = LossComputation(loss, denominators, self.model.groups)
        # megatron-core multiplies the loss by the context-parallel size, and DDP averages gradients over data- and
        # context-parallel ranks. The denominators are global already, so the factor dp undoes both.
        scale = self.model.groups.dp.size()

        def scaled_loss(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            value = compute_loss(logits_1tv[0], packed.batch, metrics)
            return value * scale, {"loss": value.detach()}

        return [
            output["loss"] for output in self.model.forward_backward(packs, scaled_loss, ddp_chunks=self._ddp_chunks)
        ]


def _wrap_in_ddp(model: MegatronModel, distributed_optimizer: bool) -> list[DistributedDataParallel]:
    mcore_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    return [
        DistributedDataParallel(model.config, mcore_config, chunk.module, pg_collection=model.groups)
        for chunk in model.chunks
    ]


def _clip_gradients(optimizer: ChainedOptimizer, grad_norm: float) -> None:
    """Clip gradients in place to the configured norm, as `ChainedOptimizer.step` does."""
    for inner in optimizer.chained_optimizers:
        parameters = [] if inner.is_stub_optimizer else inner.get_parameters()
        if parameters and inner.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=inner.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )


def _make_optimizer(
    config: OptimizerConfig, chunks: list[DistributedDataParallel], model: MegatronModel
) -> ChainedOptimizer:
    mcore_config = McoreOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=config.distributed,
        bf16=model.dtype == torch.bfloat16,
        params_dtype=model.dtype,
    )
    optimizer = get_megatron_optimizer(mcore_config, chunks, use_gloo_process_groups=False, pg_collection=model.groups)
    assert isinstance(optimizer, ChainedOptimizer), type(optimizer)
    return optimizer


def _make_scheduler(config: OptimizerConfig, optimizer: ChainedOptimizer, steps: int) -> OptimizerParamScheduler:
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
