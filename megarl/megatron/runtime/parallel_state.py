"""Process groups of the models in one process, each of which may have a layout of its own.

    actor, critic = start(ParallelConfig(tp=2), ...), start(ParallelConfig(pp=2), ...)
    actor.activate()        # megatron-core computes with tp 2
    critic.activate()       # with pp 2

Groups are passed to megatron-core explicitly. But parts of it read the variables of `parallel_state`, and all of it
draws from one set of random generators; so whichever model computes puts its own there first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.config.trainer import ParallelConfig
from megarl.megatron.runtime import platform

_IMPORTED = dict(vars(parallel_state))
"""The variables of a process that has no groups yet."""


@dataclass(slots=True, eq=False)
class _Layout:
    """The groups of one layout, for all models that have it."""

    groups: ProcessGroupCollection | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """Of parallel_state, while another layout is active: those that are not as they were imported."""


@dataclass(slots=True)
class _Generators:
    """Where the random generators of a model are."""

    tracked: dict[str, Any]
    device: torch.Tensor
    host: torch.Tensor


class ParallelState:
    """One model's process groups and random generators in this process."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self._generators: _Generators | None = None
        """While another model is active."""

    @property
    def groups(self) -> ProcessGroupCollection:
        """Every group that this rank is in."""
        assert self._layout.groups is not None
        return self._layout.groups

    def activate(self) -> None:
        """Have megatron-core read this model's from now on; every computation with the model begins with it."""
        global _active
        if _active is self:
            return
        if _active is not None:
            _active._leave()
        vars(parallel_state).update(self._layout.variables)
        if self._generators is not None:
            tensor_parallel.get_cuda_rng_tracker().set_states(self._generators.tracked)
            torch.cuda.set_rng_state(self._generators.device)
            torch.set_rng_state(self._generators.host)
        _active = self

    def _leave(self) -> None:
        variables = vars(parallel_state)
        changed = [name for name, value in _IMPORTED.items() if variables[name] is not value]
        self._layout.variables = {name: variables[name] for name in changed}
        variables.update({name: _IMPORTED[name] for name in changed})
        tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
        self._generators = _Generators(tracked, torch.cuda.get_rng_state(), torch.get_rng_state())


_layouts: dict[tuple[int, ...], _Layout] = {}
_active: ParallelState | None = None


def start(config: ParallelConfig, *, seed: int, timeout: timedelta) -> ParallelState:
    """The groups of a model, which is active from now on; all ranks together.

    The first of a process joins the world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment). A later one
    of an equal layout has the same groups. Random generators start from `seed` for each.
    """
    if not dist.is_initialized():
        dist.init_process_group(platform.backend(), timeout=timeout)
    sizes = (config.tp, config.pp, config.cp, config.ep, config.expert_tp, config.vpp)
    layout = _layouts.setdefault(sizes, _Layout())
    state = ParallelState(layout)
    state.activate()
    if layout.groups is None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            expert_tensor_parallel_size=config.expert_tp,
            virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        )
        layout.groups = ProcessGroupCollection.use_mpu_process_groups()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return state
