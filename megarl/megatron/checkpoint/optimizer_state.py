"""State of megatron-core's optimizer on this rank: moments and main parameters by parameter, and the step count.

Adam's state is created where it is missing. An optimizer of another class creates its own in its first step, and what
it then has is its state: tensors as large as the parameter, by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.megatron.training.optimizer_class import STEP, is_saved_state

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")

MAIN_PARAM = "param"
"""megatron-core's checkpoint key of the float32 main copy of a 16-bit parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerShard:
    """The range of a flattened parameter that this rank steps; empty if other ranks step all of it."""

    start: int
    stop: int
    is_distributed: bool
    """Each data-parallel rank holds its own range; otherwise each holds the full parameter's state."""
    tensors: Mapping[str, Tensor]
    """State tensors of `stop - start` values, by name: of Adam `MOMENTS`; and `MAIN_PARAM` for a 16-bit parameter."""


def collect_optimizer_shards(optimizer: ChainedOptimizer) -> dict[int, OptimizerShard]:
    """Return the optimizer shard of each parameter, by the parameter's `id`.

    State that Adam's first step would create is initialized with zeros.

    Args:
        optimizer: megatron-core's optimizer of all model chunks.
    """
    shards: dict[int, OptimizerShard] = {}
    for member in _sub_optimizers(optimizer):
        if is_adam(member):
            _require_state(member)
        for buffer in getattr(member, "buffers", ()):
            empty = OptimizerShard(start=0, stop=0, is_distributed=True, tensors={})
            shards |= {id(parameter): empty for parameter in buffer.param_index_map}
        for parameter, main, start in stepped_parameters(member):
            state = member.optimizer.state.get(main, {})
            names = MOMENTS if is_adam(member) else _saved_names(state, main)
            tensors = {name: state[name].detach().view(-1) for name in names}
            if parameter.dtype != torch.float32:
                # where Adam steps the 16-bit parameter, it keeps the float32 one in its own state
                full = state.get("master_param", main) if is_adam(member) else main
                tensors[MAIN_PARAM] = full.detach().view(-1)
            shards[id(parameter)] = OptimizerShard(
                start=start,
                stop=start + main.numel(),
                is_distributed=isinstance(member, DistributedOptimizer),
                tensors=tensors,
            )
    return shards


def read_step(optimizer: ChainedOptimizer) -> int:
    """Return the number of optimizer steps taken, which determines Adam's bias correction; 0 if none are counted."""
    steps = set()
    for inner in _torch_optimizers(optimizer):
        steps |= {int(group["step"]) for group in inner.param_groups if group["params"] and "step" in group}
        steps |= {int(state["step"]) for state in inner.state.values() if "step" in state}
    assert len(steps) <= 1, f"parameters have different step counts: {sorted(steps)}"
    return steps.pop() if steps else 0


def write_step(optimizer: ChainedOptimizer, step: int) -> None:
    """Set the step count of all parameters to `step`."""
    for member in _sub_optimizers(optimizer):
        if is_adam(member):
            _require_state(member)
        else:
            _write_own_step(member.optimizer, step)
    for inner in _torch_optimizers(optimizer) if is_adam(optimizer) else ():
        if _has_step_per_parameter(inner):
            for state in inner.state.values():
                # a separate tensor for each: torch increments it in place
                state["step"] = torch.full_like(state["step"], step)
        else:
            for group in inner.param_groups:
                group["step"] = step


def _write_own_step(inner: torch.optim.Optimizer, step: int) -> None:
    """Set the step count wherever the optimizer keeps one, in the form that it has."""
    for holder in (*inner.param_groups, *inner.state.values()):
        count = holder.get(STEP)
        if isinstance(count, Tensor):
            holder[STEP] = torch.full_like(count, step)
        elif count is not None:
            holder[STEP] = type(count)(step)


def prepare_own_state(optimizer: ChainedOptimizer, *, is_saved: bool) -> None:
    """Give optimizers of other classes than Adam the state that a checkpoint is then read into.

    Where it is missing, they create it in a step with gradients of zero. The step changes parameters, which are read
    from the checkpoint too.

    Args:
        is_saved: the checkpoint has state; otherwise it is of a run before its first step, and state is dropped.
    """
    for member in () if is_adam(optimizer) else _sub_optimizers(optimizer):
        inner = member.optimizer
        if not is_saved:
            inner.state.clear()
            for group in inner.param_groups:
                group.pop(STEP, None)
        elif not any(inner.state.values()):
            for parameter in _parameters(inner):
                parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                inner.step()
            inner.zero_grad(set_to_none=True)


def is_adam(optimizer: MegatronOptimizer) -> bool:
    """Return whether the optimizer is Adam, which `make_optimizer` records."""
    return bool(optimizer.config.optimizer == "adam")


def sync_parameters(optimizer: ChainedOptimizer) -> None:
    """All-gather the parameter ranges that other data-parallel ranks step, as after every step."""
    chunks = {
        id(chunk): chunk
        for member in _sub_optimizers(optimizer)
        if isinstance(member, DistributedOptimizer)
        for chunk in member.model_chunks
    }
    for chunk in chunks.values():
        chunk.start_param_sync(force_sync=True)


def _sub_optimizers(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Return the chained optimizers that hold parameters: one for dense parameters, one for experts."""
    return [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]


def _torch_optimizers(optimizer: ChainedOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that step parameters: several of a member that does so on the host."""
    for member in _sub_optimizers(optimizer):
        inner = member.optimizer
        yield from inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else (inner,)


def _saved_names(state: Mapping[str, object], main: Tensor) -> list[str]:
    """Return the names of the tensors in the state of a parameter, which `load_optimizer` has tried out on others."""
    lost = [name for name, value in state.items() if name != STEP and not is_saved_state(name, value, main)]
    assert not lost, f"the state {', '.join(map(repr, lost))} of the optimizer is not like that of its trial"
    return [name for name in state if name != STEP]


def _require_state(member: MegatronOptimizer) -> None:
    """Create the state that Adam's first step would create."""
    inner = member.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        for each in inner.sub_optimizers:
            create_moments(each)
        inner._sync_sub_optimizers_state_to_hdo()  # as after a step: by the parameters of the model
        return
    if member.config.use_precision_aware_optimizer:
        # megatron-core's function calls this one with an argument too few
        for parameter in _parameters(inner):
            if not inner.state[parameter]:
                inner.initialize_state(parameter, member.config.store_param_remainders)
    else:
        member.init_state_fn(inner, member.config)
    _require_step(inner)


def create_moments(inner: torch.optim.Optimizer) -> None:
    """Create Adam's moments as zeros where a parameter has none, and its step counter."""
    for parameter in _parameters(inner):
        for name in MOMENTS:
            inner.state[parameter].setdefault(name, torch.zeros_like(parameter.data))
    _require_step(inner)


def _require_step(inner: torch.optim.Optimizer) -> None:
    if not _has_step_per_parameter(inner):
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            # torch's kernels read the step count where the parameter is; its loops over parameters, on the host
            device = parameter.device if group["fused"] or group["capturable"] else "cpu"
            inner.state[parameter].setdefault("step", torch.tensor(0.0, device=device))


def _parameters(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in inner.param_groups:
        yield from group["params"]


def _has_step_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """Return whether the step count is per parameter, as in torch; fused optimizers count per parameter group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def stepped_parameters(member: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (parameter, tensor that the optimizer steps, its offset in the flattened parameter)."""
    if isinstance(member, DistributedOptimizer):
        # not in the order of `model_param_group_index_map`, which is wrong in groups with parameters of two dtypes
        steps_16_bit = member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        stepped_16_bit = member.shard_float16_groups if steps_16_bit else member.shard_fp32_from_float16_groups
        for models, mains in (
            (member.model_fp32_groups, member.shard_fp32_groups),
            (member.model_float16_groups, stepped_16_bit),
        ):
            for parameter, main in zip(chain(*models), chain(*mains), strict=True):
                within = member._get_model_param_range_map(parameter)["param"]
                assert main.numel() == within.size, f"the optimizer steps {main.numel()} values of range {within}"
                yield parameter, main, within.start
        return
    parameters = _parameters_by_main(member)
    for group in member.optimizer.param_groups:
        for main in group["params"]:
            yield parameters.get(id(main), main), main, 0


def _parameters_by_main(member: MegatronOptimizer) -> dict[int, Tensor]:
    """Return the 16-bit parameters by the `id` of their float32 main parameter."""
    pairs = zip(getattr(member, "float16_groups", ()), getattr(member, "fp32_from_float16_groups", ()), strict=True)
    return {id(main): parameter for group in pairs for parameter, main in zip(*group, strict=True)}
