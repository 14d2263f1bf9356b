"""What megatron-core's optimizer remembers of each parameter on this rank, and how often it has stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")

MAIN = "param"
"""megatron-core's name in a checkpoint for the float32 copy of a parameter in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerShard:
    """The range of a parameter, flattened, that this rank steps; empty where other ranks step all of it."""

    start: int
    stop: int
    is_divided: bool
    """Data-parallel ranks have a range each; else each of them has all, the same."""
    tensors: Mapping[str, Tensor]
    """`stop - start` values each: `MOMENTS`, and `MAIN` where that is not the parameter itself."""


def optimizer_shards(optimizer: Any) -> dict[int, OptimizerShard]:
    """By the `id` of its parameter. State that would come with the first step is made, as zeros.

    Args:
        optimizer: megatron-core's, of all chunks.
    """
    shards: dict[int, OptimizerShard] = {}
    for member in _members(optimizer):
        _require_state(member)
        for buffer in getattr(member, "buffers", ()):
            nothing = OptimizerShard(start=0, stop=0, is_divided=True, tensors={})
            shards |= {id(parameter): nothing for parameter in buffer.param_index_map}
        for parameter, main, start in _stepped(member):
            of = member.optimizer.state[main]
            tensors = {name: of[name].detach().view(-1) for name in MOMENTS}
            if parameter.dtype != torch.float32:
                tensors[MAIN] = main.detach().view(-1)
            shards[id(parameter)] = OptimizerShard(
                start=start,
                stop=start + main.numel(),
                is_divided=isinstance(member, DistributedOptimizer),
                tensors=tensors,
            )
    return shards


def read_step(optimizer: Any) -> int:
    """Steps taken, which correct Adam's bias."""
    steps = set()
    for member in _members(optimizer):
        inner = member.optimizer
        steps |= {int(group["step"]) for group in inner.param_groups if group["params"] and "step" in group}
        steps |= {int(of["step"]) for of in inner.state.values() if "step" in of}
    assert len(steps) <= 1, f"parameters have been stepped {sorted(steps)} times"
    return steps.pop() if steps else 0


def write_step(optimizer: Any, step: int) -> None:
    """As if `step` steps had been taken."""
    for member in _members(optimizer):
        _require_state(member)
        if _counts_by_parameter(member.optimizer):
            for of in member.optimizer.state.values():
                # a tensor of its own for each: torch adds 1 to each in place
                of["step"] = torch.full_like(of["step"], step)
        else:
            for group in member.optimizer.param_groups:
                group["step"] = step


def spread_parameters(optimizer: Any) -> None:
    """Give data-parallel ranks the parts of their parameters that others of them step, as after every step."""
    chunks = {
        id(chunk): chunk
        for member in _members(optimizer)
        if isinstance(member, DistributedOptimizer)
        for chunk in member.model_chunks
    }
    for chunk in chunks.values():
        chunk.start_param_sync(force_sync=True)


def _members(optimizer: Any) -> list[Any]:
    """One for dense parameters, one for experts."""
    return [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]


def _require_state(member: Any) -> None:
    member.init_state_fn(member.optimizer, member.config)
    if _counts_by_parameter(member.optimizer):
        for of in member.optimizer.state.values():
            of.setdefault("step", torch.tensor(0.0))


def _counts_by_parameter(inner: Any) -> bool:
    """True of torch's; the fused ones count once a group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _stepped(member: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """A parameter, what the optimizer steps of it, and where in the flattened parameter that begins."""
    if isinstance(member, DistributedOptimizer):
        for parameter, (group, order) in member.model_param_group_index_map.items():
            main = member.optimizer.param_groups[group]["params"][order]
            within = member._get_model_param_range_map(parameter)["param"]
            assert main.numel() == within.size, f"{main.numel()} values are stepped of {within}"
            yield parameter, main, within.start
        return
    parameters = _parameters_by_main(member)
    for group in member.optimizer.param_groups:
        for main in group["params"]:
            yield parameters.get(id(main), main), main, 0


def _parameters_by_main(member: Any) -> dict[int, Tensor]:
    """Those in 16 bits, by the `id` of what is stepped for them."""
    pairs = zip(getattr(member, "float16_groups", ()), getattr(member, "fp32_from_float16_groups", ()), strict=True)
    return {id(main): parameter for group in pairs for parameter, main in zip(*group, strict=True)}
