"""Builds gradient buffers, optimizer and learning-rate schedule of megatron-core for one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import OptimizerConfig, load_decay
from megarl.errors import ConfigError
from megarl.megatron.mcore_fields import ddp_fields, find_offload_problem, optimizer_fields
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.runtime import platform
from megarl.megatron.training.optimizer_class import load_optimizer


def wrap_in_ddp(
    model: MegatronModel, config: OptimizerConfig, megatron: MegatronConfig
) -> list[DistributedDataParallel]:
    """Wrap the model's chunks with gradient buffers; with `overlap_grad_reduce` they are reduced during backward."""
    fields = ddp_fields(config, megatron, overlap=_overlaps(model))
    # megatron-core changes the configuration that it is given
    chunks = [
        DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(**fields),
            chunk.module,
            # as in Megatron-LM: only the first chunk's gradients are reduced while others are computed
            disable_bucketing=number > 0,
            pg_collection=model.groups,
        )
        for number, chunk in enumerate(model.chunks)
    ]
    if chunks[0].ddp_config.overlap_grad_reduce:
        # gradients are reduced after the last micro-batch only
        no_sync = [chunk.no_sync for chunk in chunks]
        model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return chunks


def _overlaps(model: MegatronModel) -> bool:
    """Return whether communication with other replicas overlaps with passes by default: on CUDA, if there are any."""
    return platform.is_cuda() and model.groups.dp_cp.size() > 1


def optimizer_config(
    config: OptimizerConfig, megatron: MegatronConfig, dtype: torch.dtype, *, overlap: bool
) -> McoreOptimizerConfig:
    """Return megatron-core's configuration of the optimizer for parameters of `dtype`.

    Args:
        overlap: as in `ddp_fields`.

    Raises:
        ConfigError: Adam is to run on the CPU, for which megatron-core needs 16-bit parameters.
    """
    if megatron.offloads_adam and dtype != torch.bfloat16:
        raise ConfigError("trainer.megatron.optimizer.optimizer_cpu_offload: needs model.dtype: bfloat16, got float32")
    fields = optimizer_fields(config, megatron, overlap=overlap)
    fields |= {name: getattr(torch, str(value)) for name, value in fields.items() if name.endswith("_dtype")}
    return McoreOptimizerConfig(**fields, bf16=dtype == torch.bfloat16, params_dtype=dtype)


def make_optimizer(
    model: MegatronModel, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, megatron: MegatronConfig
) -> ChainedOptimizer:
    """Build the optimizer over the chunks' parameters.

    megarl has megatron-core build Adam, and puts an optimizer of another class in its place: megatron-core knows few
    classes, and refuses SGD with the distributed optimizer.

    Raises:
        ConfigError: as `load_optimizer` and `optimizer_config`, or Adam is to run on the CPU for float32 parameters.
    """
    problem = find_offload_problem(model.architecture, megatron)
    if problem is not None:
        raise ConfigError(problem)
    other = None if config.is_adam else load_optimizer(config, megatron, model.spec.parallel, key="optimizer")
    optimizer = get_megatron_optimizer(
        optimizer_config(config, megatron, model.dtype, overlap=_overlaps(model)),
        list(chunks),
        use_gloo_process_groups=False,
        pg_collection=model.groups,
    )
    assert isinstance(optimizer, ChainedOptimizer), type(optimizer)
    for member in optimizer.chained_optimizers:
        if other is not None and not member.is_stub_optimizer:
            member.optimizer = other.create(_without_options(member.optimizer))
            member.config.optimizer = config.type  # `is_adam` reads it
    return optimizer


def _without_options(adam: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer without the options that it has put there."""
    groups = [
        {name: value for name, value in group.items() if name not in adam.defaults} for group in adam.param_groups
    ]
    for parameter in chain.from_iterable(group["params"] for group in groups):
        if not parameter.is_leaf:
            # a range of a float32 parameter is a view, and torch's constructor takes only views that keep gradients
            parameter.retain_grad()
    return groups


def squared_norms(optimizer: ChainedOptimizer) -> Tensor:
    """Return the squares whose sum is the square of the gradient norm, float32 [g], reduced over ranks.

    There is one for each group of ranks over which optimizers reduce it. `ChainedOptimizer.get_grad_norm` computes the
    same, and waits for the device to read each of them.
    """
    inner, zeros = optimizer.chained_optimizers, torch.zeros(1, dtype=torch.int, device=platform.device())
    parts = [inner] if optimizer.grads_states_parallel_group_is_shared() else [[each] for each in inner]
    squares = []
    for part in parts:
        gradients = [gradient for each in part for gradient in each.get_grads_for_grad_norm()]
        square = zeros.float()
        for same in _by_dtype(gradients, gradients):
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, zeros, [same], False)
            square = square + norm**2.0
        dist.all_reduce(square, group=part[0].get_grad_stats_parallel_group())
        squares.append(square)
    return torch.cat(squares)


def gradient_norm(squares: Sequence[float]) -> float:
    """Return the gradient norm of `squared_norms`, rounded as `ChainedOptimizer.get_grad_norm` rounds it."""
    norms = [square**0.5 for square in squares]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


def clip_gradients(optimizer: ChainedOptimizer, grad_norm: float) -> None:
    """Clip gradients in place to the configured norm, as `ChainedOptimizer.step` does."""
    for inner in optimizer.chained_optimizers:
        if inner.is_stub_optimizer or inner.config.clip_grad <= 0:
            continue
        is_decoupled = inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        gradient_of = attrgetter("decoupled_grad" if is_decoupled else "grad")
        parameters = inner.get_parameters()
        for same in _by_dtype(parameters, map(gradient_of, parameters)):
            clip_grads.clip_grad_by_total_norm_fp32(
                same,
                max_norm=inner.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=is_decoupled,
            )


def _by_dtype(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, by its dtype: kernels over many tensors take them to have one dtype.

    Gradients have two if a bfloat16 model with float32 parameters does not reduce gradients in float32.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            groups.setdefault(gradient.dtype, []).append(parameter)
    return list(groups.values())


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Complete the parameters after an update, where `overlap_param_gather` leaves that to the next forward pass.

    Weight sync, checkpoints and offloading read parameters without a forward pass.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


class FunctionSchedule(OptimizerParamScheduler):  # type: ignore[misc]
    """A schedule whose decay is a function, as `load_decay` returns it."""

    def __init__(self, decay: Callable[[float], float], *arguments: Any, **options: Any) -> None:
        self._decay = decay
        super().__init__(*arguments, **options)

    @override
    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of the next update; `num_steps` counts those before it, the warm-up included."""
        if self.lr_warmup_steps and self.num_steps <= self.lr_warmup_steps:
            return float(super().get_lr(param_group))
        highest, lowest = (float(param_group.get(name, getattr(self, name))) for name in ("max_lr", "min_lr"))
        warmup, steps = int(self.lr_warmup_steps or 0), int(self.lr_decay_steps or 0)
        done = (int(self.num_steps or 0) - warmup) / (steps - warmup)
        return lowest + float(self._decay(min(done, 1.0))) * (highest - lowest)


def make_scheduler(config: OptimizerConfig, optimizer: ChainedOptimizer, steps: int) -> OptimizerParamScheduler:
    """Build the schedule of a run with `steps` updates, none of which has learning rate 0.

    Update i of W warm-up steps, counted from 1, has learning rate lr * i / W; the decay begins at the next. Without
    warm-up the first update has the peak learning rate. The decay reaches its end one update after the last.
    """
    first = 1 if config.warmup_steps else 0
    decay = load_decay(config.decay, key="optimizer.decay")
    schedule = OptimizerParamScheduler if decay is None else partial(FunctionSchedule, decay)
    scheduler = schedule(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr if config.decay != "constant" else config.lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(steps, config.warmup_steps) + first,
        lr_decay_style=config.decay if decay is None else "linear",  # of `FunctionSchedule`, which has its own
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    scheduler.step(increment=first)
    return scheduler
