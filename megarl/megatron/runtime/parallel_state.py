"""Process groups of several models in one process, each with its own parallel layout.

    actor, critic = start(ParallelConfig(tp=2), ...), start(ParallelConfig(pp=2), ...)
    actor.activate()        # megatron-core uses tp = 2
    critic.activate()       # megatron-core uses pp = 2

Process groups are passed to megatron-core explicitly. But parts of it still read the globals of its `parallel_state`
module, and all models share one set of RNGs. So each model installs its own globals and RNG states before it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.cluster.process.ports import join_world
from megarl.config.trainer import ParallelConfig
from megarl.megatron.runtime import platform

_IMPORTED = dict(vars(parallel_state))
"""The globals of megatron-core's `parallel_state` as imported, before any group exists."""


@dataclass(slots=True, eq=False)
class _Layout:
    """The process groups of one parallel layout, shared by all models that use it."""

    groups: ProcessGroupCollection | None = None
    variables: dict[str, object] = field(default_factory=dict)
    """Globals of `parallel_state` that differ from `_IMPORTED`; saved while another layout is active."""


@dataclass(slots=True)
class _RngState:
    """RNG states of one model: megatron-core's tracker, device and CPU."""

    tracked: dict[str, torch.Tensor]
    device: torch.Tensor
    host: torch.Tensor


class ParallelState:
    """One model's process groups and RNG states in this process."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self._generators: _RngState | None = None
        """Saved RNG states while another model is active."""

    @property
    def groups(self) -> ProcessGroupCollection:
        """All process groups that this rank belongs to."""
        assert self._layout.groups is not None
        return self._layout.groups

    def activate(self) -> None:
        """Install this model's globals and RNG states in megatron-core; required before computing with the model."""
        global _active
        if _active is self:
            return
        if _active is not None:
            _active._save_state()
        vars(parallel_state).update(self._layout.variables)
        if self._generators is not None:
            tensor_parallel.get_cuda_rng_tracker().set_states(self._generators.tracked)
            torch.cuda.set_rng_state(self._generators.device)
            torch.set_rng_state(self._generators.host)
        _active = self

    def _save_state(self) -> None:
        variables = vars(parallel_state)
        changed = [name for name, value in _IMPORTED.items() if variables[name] is not value]
        self._layout.variables = {name: variables[name] for name in changed}
        variables.update({name: _IMPORTED[name] for name in changed})
        tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
        self._generators = _RngState(tracked, torch.cuda.get_rng_state(), torch.get_rng_state())


_layouts: dict[tuple[int, ...], _Layout] = {}
_active: ParallelState | None = None


def init_parallel_state(config: ParallelConfig, *, seed: int, timeout: timedelta) -> ParallelState:
    """Create a model's process groups and activate them. Collective call on all ranks.

    The first call in a process also initializes torch.distributed (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from
    the environment). Models of equal layout share their groups. RNGs are seeded with `seed` for each model.
    """
    if not dist.is_initialized():
        join_world(platform.backend(), timeout)
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
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
            create_gloo_process_groups=False,
        )
        layout.groups = ProcessGroupCollection.use_mpu_process_groups()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return state
