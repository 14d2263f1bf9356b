"""Training on one Megatron rank: model, optimizer, learning-rate schedule. All ranks call every method collectively.

Shapes: T tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megarl.batch.pack import PackedBatch
from megarl.batch.trajectory import Routes, count_routed
from megarl.functional import Denominators, Sequences
from megarl.functional.losses import clamp_log_ratio
from megarl.losses import AnyLoss, LossBatch, ModelOutput, ValueHeadLoss, token_scores, token_values
from megarl.megatron.checkpoint.training_state import TrainCheckpoint
from megarl.megatron.modeling.megatron_model import LocalPack, MegatronModel
from megarl.megatron.request_samples import POLICY_VERSIONS, StepSamples
from megarl.megatron.requests import (
    MISSING_ROUTES,
    RATIO_MEAN,
    RATIO_SQUARE_MEAN,
    MiniBatch,
    ProfileSpec,
    TrainerSpec,
    TrainRequest,
    TrainStats,
)
from megarl.megatron.runtime import platform
from megarl.megatron.runtime.offload import TrainerMemory
from megarl.megatron.training.metric_sums import DeviceMetrics, ExpertLoad, MetricSums, freeze_routers, read_metrics
from megarl.megatron.training.optimizer import (
    clip_gradients,
    gather_parameters,
    make_optimizer,
    make_scheduler,
    squared_norms,
    wrap_in_ddp,
)
from megarl.megatron.training.update_guard import UpdateGuard


@dataclass(frozen=True)
class LossComputation:
    """Computes the loss of one mini-batch, micro-batch by micro-batch, and adds its metrics."""

    loss: AnyLoss
    denominators: Denominators
    """Global token and sequence counts of the mini-batch."""
    groups: ProcessGroupCollection

    def __call__(self, scores: ModelOutput, pack: PackedBatch, metrics: MetricSums) -> Tensor:
        """Return this micro-batch's share of the loss, a scalar, from the model's output."""
        batch = self._loss_batch(pack)
        if isinstance(self.loss, ValueHeadLoss):
            output = self.loss(token_values(scores), batch)
        else:
            tokens = token_scores(scores)
            metrics.add("entropy", batch.token_mean(tokens.entropy_T))
            output = self.loss(tokens, batch)
        for name, value in output.metrics.items():
            metrics.add(name, value)
        for name, value in output.maxima.items():
            metrics.update_max(name, value)
        metrics.add("loss", output.loss)
        return output.loss

    def _loss_batch(self, pack: PackedBatch) -> LossBatch:
        cp_size: int = self.groups.cp.size()
        sequences = Sequences(
            ids_T=pack.sequence_ids_T,
            count=len(pack.cu_seqlens_S) - 1,
            reduce=_make_all_reduce(self.groups.cp) if cp_size > 1 else None,
        )
        return LossBatch(pack=pack, denominators=self.denominators, sequences=sequences, cp_size=cp_size)


def add_mismatch_metrics(pack: PackedBatch, batch: MiniBatch, request: TrainRequest, metrics: MetricSums) -> None:
    """Add metrics of the difference between trainer and engine log-probabilities of the sampled tokens.

    If tokens may be of older policies, the metrics of the mismatch are of the current policy's tokens only, and absent
    if there are none. The difference to the older policies, which have trained since, goes into the metrics `drift/`.

    Args:
        pack: a pack of the mini-batch, with the column `old_logprobs`.
    """
    versions, num_tokens, num_updates = request.versions, batch.denominators.num_tokens, len(request.mini_batches)
    difference_T = torch.where(pack.mask_T, pack.columns["old_logprobs"] - pack.rollout_logprobs_T, 0.0)
    if versions is None:
        _add_differences(difference_T, pack.mask_T, num_tokens, metrics)
        return
    current_T = pack.mask_T & (pack.columns[POLICY_VERSIONS] == versions.current)
    if versions.num_current_tokens:  # the metrics are means over the mini-batches
        current = torch.where(current_T, difference_T, 0.0)
        _add_differences(current, current_T, versions.num_current_tokens / num_updates, metrics)
    older_T = torch.where(current_T, 0.0, difference_T)
    metrics.add("drift/logprob_abs_mean", older_T.abs().sum() / num_tokens)
    metrics.add("drift/kl", _k3(older_T).sum() / num_tokens)
    ratio_T = torch.where(pack.mask_T, clamp_log_ratio(difference_T).exp(), 0.0)
    metrics.add(RATIO_MEAN, ratio_T.sum() / num_tokens)
    metrics.add(RATIO_SQUARE_MEAN, ratio_T.square().sum() / num_tokens)


def _add_differences(difference_T: Tensor, mask_T: Tensor, num_tokens: float, metrics: MetricSums) -> None:
    """Add the metrics of the mismatch; `num_tokens`: tokens of the mini-batch on all ranks."""
    metrics.update_max("train_infer_mismatch/logprob_abs_max", difference_T.abs().max())
    metrics.add_values("train_infer_mismatch/logprob_abs_p99", difference_T.abs(), mask_T)
    metrics.add("train_infer_mismatch/logprob_abs_mean", difference_T.abs().sum() / num_tokens)
    metrics.add("train_infer_mismatch/kl", _k3(difference_T).sum() / num_tokens)


def _k3(difference_T: Tensor) -> Tensor:
    """Return the k3 estimate of KL(rollout || trainer), Schulman 2020: e^x - 1 - x >= 0, finite for any finite x."""
    difference_T = clamp_log_ratio(difference_T)
    return difference_T.exp() - 1 - difference_T


def _make_all_reduce(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a differentiable all-reduce (sum) over the group."""

    def reduce(value: Tensor) -> Tensor:
        total: Tensor = _AllReduce.apply(value, group)  # type: ignore[no-untyped-call]
        return total

    return reduce


class _AllReduce(torch.autograd.Function):
    """All-reduce (sum) whose backward pass all-reduces the gradients of the ranks."""

    @staticmethod
    def forward(ctx, value: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        ctx.group = group
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@contextmanager
def traced(spec: ProfileSpec | None) -> Iterator[None]:
    """Trace the block and write `<folder>/step-<step>-rank-<rank>.json.gz`, if `spec` asks this rank for it.

    The block has to wait for its kernels, as a training step does when it returns metrics; later ones are missing.
    A block that raises writes nothing.
    """
    if spec is None or dist.get_rank() not in spec.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.is_cuda() else [])]
    with profile(activities=activities) as trace:
        yield
    Path(spec.folder).mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(f"{spec.folder}/step-{spec.step}-rank-{dist.get_rank()}.json.gz")


@dataclass(slots=True, kw_only=True)
class Step:
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
        self.ddp_chunks = wrap_in_ddp(model, spec.optimizer, megatron)
        """The model's chunks with their gradient buffers, one per virtual pipeline stage of this rank."""
        self.optimizer = make_optimizer(model, self.ddp_chunks, spec.optimizer, megatron)
        """Megatron-core's distributed optimizer of this rank."""
        self.scheduler = make_scheduler(spec.optimizer, self.optimizer, spec.optimizer_steps)
        """Sets the learning rate and weight decay of the optimizer; one step per update, rejected or not."""
        self.memory = TrainerMemory(model, self.ddp_chunks, self.optimizer)
        self.checkpoint = TrainCheckpoint(model, self.optimizer, self.scheduler, self.memory)

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Take one optimizer step per mini-batch, repeated `request.epochs` times, and return the reduced metrics.

        Where the loss reads `old_logprobs` and the request lacks them, they are those before the step's first update:
        of the forward passes of that update for its mini-batch, and of separate ones for the others.
        """
        self.memory.onload()
        samples = StepSamples.fetch(request)
        step = Step(request=request, guard=UpdateGuard(request, samples, self.model))
        batches = [self.make_packs(batch, request, samples) for batch in request.mini_batches]
        num_reused = 1 if step.reuses_forward else 0
        batches[num_reused:] = self._compare_with_engines(step, request.mini_batches[num_reused:], batches[num_reused:])
        for _ in range(request.epochs):
            for index, (batch, packs) in enumerate(zip(request.mini_batches, batches, strict=True)):
                learning_rate = self._learning_rate
                self.try_update(step, batch, packs, reuses_forward=index < num_reused)
        gather_parameters(self.ddp_chunks)
        out = read_metrics(self._mean_metrics(step.metrics, step.guard.updates), self._mean_mismatch(step))
        out |= {**step.guard.metrics(), **self._expert_load.metrics(), "learning_rate": learning_rate}
        if self.model.spec.moe.router_replay == "R3":
            out[MISSING_ROUTES] = self._missing_routes(request, samples)
        assert request.totals is not None, "the request has not been split over replicas"
        return TrainStats(metrics=out, num_tokens=request.totals.num_tokens)

    def _mean_metrics(self, metrics: MetricSums, count: int) -> DeviceMetrics:
        """Return the metrics, reduced over ranks, per update or mini-batch; empty except on the last pipeline stage."""
        return metrics.reduce(self.model.groups.dp_cp, count=count) if self.model.is_last_stage else DeviceMetrics()

    def _allows_updates(self, step: Step) -> bool:
        """Return whether the mismatch, which is complete, is within its limits."""
        if step.allows_updates is None:
            step.allows_updates = not step.guard.checks_mismatch or step.guard.allows_step(self._mean_mismatch(step))
        return step.allows_updates

    def _mean_mismatch(self, step: Step) -> DeviceMetrics:
        """Return the metrics of the mismatch, which is complete before the first update, reduced once per step."""
        if step.mean_mismatch is None:
            step.mean_mismatch = self._mean_metrics(step.mismatch, len(step.request.mini_batches))
        return step.mean_mismatch

    def make_packs(self, batch: MiniBatch, request: TrainRequest, samples: StepSamples) -> list[LocalPack]:
        """Pack the mini-batch's micro-batches with all columns of the request."""
        packs = []
        for micro_batch in batch.micro_batches:
            refs = [batch.samples[i] for i in micro_batch]
            columns = samples.pack_columns(batch, refs)
            trajectories = [samples.trajectory(ref) for ref in refs]
            routes: list[Routes | None] | None = self.model.given_routes(trajectories)
            if samples.routes is not None:
                routes = [samples.routes[ref.key] for ref in refs]
            packs.append(self.model.pack(trajectories, columns, routes=routes))
        return packs

    def _missing_routes(self, request: TrainRequest, samples: StepSamples) -> float:
        """Return the share of tokens without a route among those that a trained token depends on. Collective call."""
        counted = [count_routed(samples.trajectory(ref)) for batch in request.mini_batches for ref in batch.samples]
        totals = torch.tensor([[0, 0], *counted], dtype=torch.int64, device=platform.device()).sum(0)
        dist.all_reduce(totals, group=self.model.groups.dp)
        num_routed, num_tokens = totals.tolist()
        return 1 - num_routed / num_tokens if num_tokens else 0.0

    def _compare_with_engines(
        self, step: Step, mini_batches: Sequence[MiniBatch], batches: list[list[LocalPack]]
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
        return float(self.optimizer.param_groups[0]["lr"])

    def try_update(self, step: Step, batch: MiniBatch, packs: Sequence[LocalPack], *, reuses_forward: bool) -> None:
        """Compute the gradient of one mini-batch and update, unless the guard rejects the step or the update.

        Adds the metrics of this update to those of the step, unless it was rejected.

        Args:
            reuses_forward: as in `accumulate_gradients`, after which the mismatch is complete.
        """
        if reuses_forward or self._allows_updates(step):
            for chunk in self.ddp_chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            updated = step.metrics.copy()
            losses = self.accumulate_gradients(step, batch, packs, updated, reuses_forward=reuses_forward)
            if self._allows_updates(step):
                # as in megatron-core's `optimizer.step()`, with the guard between gradient norm and clipping
                self.optimizer.prepare_grads()
                grad_norm = step.guard.check_update(batch, losses, squared_norms(self.optimizer))
                if grad_norm is not None:
                    clip_gradients(self.optimizer, grad_norm)
                    self.optimizer.step_with_ready_grads()
                    step.metrics = updated
        self.scheduler.step(increment=1)

    def accumulate_gradients(
        self, step: Step, batch: MiniBatch, packs: Sequence[LocalPack], metrics: MetricSums, *, reuses_forward: bool
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
            output["loss"] for output in self.model.forward_backward(packs, scaled_loss, ddp_chunks=self.ddp_chunks)
        ]
