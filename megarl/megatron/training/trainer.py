"""Training on one Megatron rank: model, optimizer, learning-rate schedule. All ranks call every method collectively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megarl.megatron.checkpoint.training_state import TrainCheckpoint
from megarl.megatron.losses.loss import ModelOutput, token_scores
from megarl.megatron.modeling.megatron_model import LocalPack, MegatronModel
from megarl.megatron.requests import MiniBatch, TrainerSpec, TrainRequest, TrainStats
from megarl.megatron.runtime.offload import TrainerMemory
from megarl.megatron.training.expert_load import ExpertLoad, freeze_routers
from megarl.megatron.training.loss import LossComputation, add_mismatch_metrics
from megarl.megatron.training.metric_sums import DeviceMetrics, MetricSums, read_metrics
from megarl.megatron.training.optimizer import (
    clip_gradients,
    gather_parameters,
    make_optimizer,
    make_scheduler,
    squared_norms,
    wrap_in_ddp,
)
from megarl.megatron.training.samples import StepSamples
from megarl.megatron.training.update_guard import UpdateGuard


@dataclass(slots=True, kw_only=True)
class _Step:
    """What the updates of one training step have in common."""

    request: TrainRequest
    guard: UpdateGuard
    metrics: MetricSums = field(default_factory=MetricSums)
    """Of the updates made."""
    mismatch: MetricSums = field(default_factory=MetricSums)
    """Of the log-probabilities before the first update, compared with those of the engines."""
    mean_mismatch: DeviceMetrics | None = None
    """`mismatch`, reduced over ranks; None: not reduced yet."""
    allows_updates: bool | None = None
    """Whether the mismatch is within its limits; None: not checked yet."""

    @property
    def reuses_forward(self) -> bool:
        """Whether `old_logprobs` of the first mini-batch are those of the forward pass that trains on it.

        They are unless a second epoch needs them too, or something needed the column earlier, so that the request has
        it.
        """
        missing = "old_logprobs" in self.request.loss.columns and "old_logprobs" not in self.request.columns
        return self.request.epochs == 1 and missing


class MegatronTrainer:
    """This rank's shards of model, gradients and optimizer state, and the training step.

    `TrainerWorker` wraps it with the methods that the controller calls.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.model = model = MegatronModel(spec.model)
        model.config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=model.groups)
        if spec.model.moe.freeze_router:
            freeze_routers(model)
        self._expert_load = ExpertLoad(model)
        megatron = spec.model.megatron
        self._ddp_chunks = wrap_in_ddp(model, spec.optimizer, megatron)
        self._optimizer = make_optimizer(model, self._ddp_chunks, spec.optimizer, megatron)
        self._scheduler = make_scheduler(spec.optimizer, self._optimizer, spec.optimizer_steps)
        self.memory = TrainerMemory(model, self._ddp_chunks, self._optimizer)
        self.checkpoint = TrainCheckpoint(model, self._optimizer, self._scheduler, self.memory)

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Take one optimizer step per mini-batch, repeated `request.epochs` times, and return the reduced metrics.

        Where the loss reads `old_logprobs` and the request lacks them, they are those before the step's first update:
        of the forward passes of that update for its mini-batch, and of separate ones for the others.
        """
        self.memory.onload()
        samples = StepSamples.fetch(request)
        step = _Step(request=request, guard=UpdateGuard(request, samples, self.model))
        batches = [self._make_packs(batch, request, samples) for batch in request.mini_batches]
        num_reused = 1 if step.reuses_forward else 0
        batches[num_reused:] = self._compare_with_engines(step, request.mini_batches[num_reused:], batches[num_reused:])
        for _ in range(request.epochs):
            for index, (batch, packs) in enumerate(zip(request.mini_batches, batches, strict=True)):
                learning_rate = self._learning_rate
                self._try_update(step, batch, packs, reuses_forward=index < num_reused)
        gather_parameters(self._ddp_chunks)
        out = read_metrics(self._mean_metrics(step.metrics, step.guard.updates), self._mean_mismatch(step))
        out |= {**step.guard.metrics(), **self._expert_load.metrics(), "learning_rate": learning_rate}
        assert request.totals is not None, "the request has not been split over replicas"
        return TrainStats(metrics=out, num_tokens=request.totals.num_tokens)

    def _mean_metrics(self, metrics: MetricSums, count: int) -> DeviceMetrics:
        """Return the metrics, reduced over ranks, per update or mini-batch; empty except on the last pipeline stage."""
        return metrics.reduce(self.model.groups.dp_cp, count=count) if self.model.is_last_stage else DeviceMetrics()

    def _allows_updates(self, step: _Step) -> bool:
        """Return whether the mismatch, which is complete, is within its limits."""
        if step.allows_updates is None:
            step.allows_updates = not step.guard.checks_mismatch or step.guard.allows_step(self._mean_mismatch(step))
        return step.allows_updates

    def _mean_mismatch(self, step: _Step) -> DeviceMetrics:
        """Return the metrics of the mismatch, which is complete before the first update, reduced once per step."""
        if step.mean_mismatch is None:
            step.mean_mismatch = self._mean_metrics(step.mismatch, len(step.request.mini_batches))
        return step.mean_mismatch

    def _make_packs(self, batch: MiniBatch, request: TrainRequest, samples: StepSamples) -> list[LocalPack]:
        """Pack the mini-batch's micro-batches with all columns of the request."""
        packs = []
        for micro_batch in batch.micro_batches:
            refs = [batch.samples[i] for i in micro_batch]
            columns = samples.pack_columns(batch, refs)
            packs.append(self.model.pack([samples.trajectory(ref) for ref in refs], columns))
        return packs

    def _compare_with_engines(
        self, step: _Step, mini_batches: Sequence[MiniBatch], batches: list[list[LocalPack]]
    ) -> list[list[LocalPack]]:
        """Return the packs with `old_logprobs`, if the loss reads them, and add the metrics of their mismatch."""
        if "old_logprobs" not in step.request.loss.columns:
            return batches
        if "old_logprobs" not in step.request.columns:
            batches = [self._with_old_logprobs(packs) for packs in batches]
        for batch, packs in zip(mini_batches, batches, strict=True):
            for packed in packs if self.model.is_last_stage else ():
                add_mismatch_metrics(packed.batch, batch, step.request, step.mismatch)
        return batches

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

    def _try_update(self, step: _Step, batch: MiniBatch, packs: Sequence[LocalPack], *, reuses_forward: bool) -> None:
        """Compute the gradient of one mini-batch and update, unless the guard rejects the step or the update.

        Adds the metrics of this update to those of the step, unless it was rejected.

        Args:
            reuses_forward: as in `_accumulate_gradients`, after which the mismatch is complete.
        """
        if reuses_forward or self._allows_updates(step):
            for chunk in self._ddp_chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            updated = step.metrics.copy()
            losses = self._accumulate_gradients(step, batch, packs, updated, reuses_forward=reuses_forward)
            if self._allows_updates(step):
                # as in megatron-core's `optimizer.step()`, with the guard between gradient norm and clipping
                self._optimizer.prepare_grads()
                grad_norm = step.guard.check_update(batch, losses, squared_norms(self._optimizer))
                if grad_norm is not None:
                    clip_gradients(self._optimizer, grad_norm)
                    self._optimizer.step_with_ready_grads()
                    step.metrics = updated
        self._scheduler.step(increment=1)

    def _accumulate_gradients(
        self, step: _Step, batch: MiniBatch, packs: Sequence[LocalPack], metrics: MetricSums, *, reuses_forward: bool
    ) -> list[Tensor]:
        """Run forward and backward; leaves the gradient, reduced over all ranks, in the DDP gradient buffers.

        Args:
            reuses_forward: take `old_logprobs` from this forward pass, and add the metrics of their mismatch.

        Returns:
            This rank's share of the loss of each micro-batch, scalars; empty except on the last pipeline stage.
        """
        compute_loss = LossComputation(step.request.loss, batch.denominators, self.model.groups)
        # megatron-core multiplies the loss by the context-parallel size, and DDP averages gradients over data- and
        # context-parallel ranks. The denominators are global already, so the factor dp undoes both.
        scale = self.model.groups.dp.size()

        def scaled_loss(output: ModelOutput, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            tokens = packed.batch
            if reuses_forward:
                tokens = tokens.with_column("old_logprobs", token_scores(output).logprobs_T.detach())
                add_mismatch_metrics(tokens, batch, step.request, step.mismatch)
            value = compute_loss(output, tokens, metrics)
            return value * scale, {"loss": value.detach()}

        return [
            output["loss"] for output in self.model.forward_backward(packs, scaled_loss, ddp_chunks=self._ddp_chunks)
        ]
