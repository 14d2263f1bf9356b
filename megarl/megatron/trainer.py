"""One Megatron rank: model, optimizer, and the steps they take. Every method is called on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.batch.pack import PackedBatch, pack
from megarl.batch.trajectory import Trajectory
from megarl.config.trainer import OptimizerConfig
from megarl.megatron import parallel, platform, weights
from megarl.megatron.logprobs import token_logprobs
from megarl.megatron.metrics import MetricSums
from megarl.megatron.model import build_model, read_model, transformer_config
from megarl.megatron.objective import Objective, mismatch
from megarl.megatron.packing import describe_pack
from megarl.megatron.work import MiniBatch, TrainerSpec, TrainStats, TrainWork

Samples = Sequence[Sequence[Trajectory]]
"""[payload][index]"""


class MegatronTrainer:
    """Holds this rank's shards; see `TrainerWorker` for what the controller may call."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        config = spec.trainer.parallel
        self.groups = parallel.start(config, seed=spec.seed, timeout=timedelta(seconds=spec.timeout_seconds))
        self.model = read_model(spec.model_path)
        self.dtype = _compute_dtype(spec.dtype)
        self._config = transformer_config(self.model, config, self.dtype)
        self._config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=self.groups)
        stage = build_model(self.model, self._config, self.groups, temperature=spec.temperature)
        self.layout = weights.layout(self.model, weights.local_tensors(stage), self.groups, self.dtype)
        weights.read_weights(spec.model_path, self.layout, weights.local_tensors(stage))
        self.stage = stage
        self._is_last = self.groups.pp.rank() == self.groups.pp.size() - 1
        self._multiple = config.tp if config.uses_sequence_parallel else 1
        self._ddp = _distribute(stage, self._config, self.groups, spec.trainer.optimizer.distributed)
        self._optimizer = _make_optimizer(spec.trainer.optimizer, self._ddp, self.groups, self.dtype)
        self._scheduler = _make_scheduler(spec.trainer.optimizer, self._optimizer, spec.optimizer_steps)

    def train_step(self, work: TrainWork) -> TrainStats:
        """All mini-batches of the work, one optimizer step each."""
        samples: Samples = [payload.fetch() for payload in work.payloads]
        metrics = MetricSums()
        old_logprobs = [self._old_logprobs(b, work, samples, metrics) for b in work.mini_batches]
        grad_norms, learning_rate = [], 0.0
        for batch, old in zip(work.mini_batches, old_logprobs, strict=True):
            learning_rate = self._optimizer.param_groups[0]["lr"]
            grad_norms.append(self._optimizer_step(batch, old, work, samples, metrics))
        reduced = metrics.reduce(self.groups.dp_cp) if self._is_last else {}
        steps = len(work.mini_batches)
        out = {k: v if k.endswith("_max") else v / steps for k, v in reduced.items()}
        out |= {"grad_norm": sum(grad_norms) / steps, "learning_rate": learning_rate}
        tokens = sum(s.num_tokens for b in work.mini_batches for s in b.samples)
        return TrainStats(metrics=out, num_tokens=tokens)

    def _old_logprobs(
        self, batch: MiniBatch, work: TrainWork, samples: Samples, metrics: MetricSums
    ) -> list[Tensor] | None:
        """Per micro-batch the policy's log-probabilities before this step's first update (last stage only)."""
        if work.policy_loss is None:
            return None
        packs = self._packs(batch, samples)
        logprobs = self._logprobs(packs)
        for logprobs_T, packed in zip(logprobs, packs, strict=False):
            mismatch(logprobs_T, packed, batch.denominators.num_tokens, metrics)
        return logprobs

    @torch.no_grad()
    def _logprobs(self, packs: Sequence[PackedBatch]) -> list[Tensor]:
        def keep(logits_1Tv: Tensor, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs_T = token_logprobs(logits_1Tv[0], packed.target_ids_T)
            return logprobs_T.new_zeros(()), {"logprobs_T": logprobs_T}

        outputs = self._run(packs, keep, forward_only=True)
        return [output["logprobs_T"] for output in outputs]

    def _optimizer_step(
        self, batch: MiniBatch, old: list[Tensor] | None, work: TrainWork, samples: Samples, metrics: MetricSums
    ) -> float:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._accumulate(batch, old, work, samples, metrics)
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(increment=1)
        return float(grad_norm or 0.0)

    def _accumulate(
        self, batch: MiniBatch, old: list[Tensor] | None, work: TrainWork, samples: Samples, metrics: MetricSums
    ) -> None:
        """Leave the mini-batch's gradient, reduced over all ranks, in the gradient buffers."""
        objective = Objective(work.policy_loss, batch.denominators, work.length_norm, self.groups.tp)
        packs = self._packs(batch, samples)
        # megatron-core divides by the number of micro-batches, and DDP averages over the data-parallel ranks;
        # the objective's denominators are global already, so both are undone here.
        scale = len(packs) * self.groups.dp_cp.size()
        remaining = iter(old) if old is not None else None

        def loss(logits_1Tv: Tensor, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            old_T = next(remaining) if remaining is not None else None
            value = objective(logits_1Tv[0], packed, old_T, metrics)
            return value * scale, {}

        self._run(packs, loss, forward_only=False)

    def _packs(self, batch: MiniBatch, samples: Samples) -> list[PackedBatch]:
        packs = []
        for micro_batch in batch.micro_batches:
            refs = [batch.samples[i] for i in micro_batch]
            trajectories = [samples[r.payload][r.index] for r in refs]
            packed = pack(trajectories, [r.advantage for r in refs], multiple=self._multiple)
            packs.append(PackedBatch(**{f.name: getattr(packed, f.name).to(platform.device()) for f in fields(packed)}))
        return packs

    def _run(self, packs: Sequence[PackedBatch], loss: Any, *, forward_only: bool) -> list[dict[str, Tensor]]:
        """megatron-core's schedule over the micro-batches; the last stage's loss outputs."""

        def step(data: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
            packed = next(data)
            output = model(
                packed.token_ids_T[None],
                packed.position_ids_T[None],
                None,
                packed_seq_params=describe_pack(packed.cu_seqlens_S),
            )
            return output, partial(loss, packed=packed)

        outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(packs),
            model=[self._ddp],
            num_microbatches=len(packs),
            seq_length=max(len(p.token_ids_T) for p in packs),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters under the names that `layout` uses."""
        return weights.local_tensors(self.stage)


def _compute_dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if platform.is_cuda() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _distribute(stage: Any, config: Any, groups: Any, distributed_optimizer: bool) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(config, settings, stage, pg_collection=groups)


def _make_optimizer(config: OptimizerConfig, ddp: DistributedDataParallel, groups: Any, dtype: torch.dtype) -> Any:
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
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    return get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False, pg_collection=groups)


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
