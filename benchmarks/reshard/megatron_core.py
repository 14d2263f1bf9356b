"""Contender `megatron_core`: megatron-core's own resharding between two of its models on the same ranks.

Import this module after `megarl.megatron.runtime.platform.prepare()`.

Both sides are real GPTModels, the destination in Megatron's layout for the sizes of one engine (as in Megatron's own
inference), its stages placed in Megatron's order. The report covers `swap_model_weights`: bytes and messages are
counted where its copy service is about to post them; planning is `prepare_swap_model_weights` (ranks exchange what they
hold, each plans for itself, and the plan is cached); memory is a lower bound of what it allocates before the transfer:
every slice that is copied to be sent, and every receive buffer that is no slice of the destination. What gloo's copy
service allocates besides is not counted, because that of NCCL does not.

With the hand-over `direct`, the destination model is the engine. With `shared-memory`, its parameters are then handed
to an engine of the same layout through megarl's buckets in shared memory, which are kept from sync to sync.

`nccl_m2n` is the same with NVIDIA's NCCL M2N as its backend, in versions of megatron-core that have it. It has not been
run on a GPU yet.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.refit import (
    RefitBackendName,
    clear_plan_cache,
    get_or_create_service,
    prepare_swap_model_weights,
    swap_model_weights,
)

from benchmarks.reshard.contender import HandOver
from benchmarks.reshard.content import Shard
from benchmarks.reshard.megatron_limits import megatron_grids
from benchmarks.reshard.show import NCCL_M2N
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.trainer_layouts import EVEN, trainer_layouts
from megarl.megatron.local_layout import find_weights, view_weights
from megarl.megatron.modeling.gpt_model import HeadOptions, build_chunks
from megarl.megatron.modeling.layer_spec import layer_backend
from megarl.megatron.modeling.transformer_config import transformer_config
from megarl.megatron.runtime import platform
from megarl.reshard.analysis.scenario import Arrangement, Scenario
from megarl.reshard.layout.layout import WeightLayout, volume
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import SyncMemory, torch_dtype
from megarl.reshard.transfer.executor import BoxExecutor


class MegatronCore:
    """The `Contender` that resharding of megarl is compared with."""

    trained_layers: int | None = None
    """All weights are sent in every sync."""

    def __init__(self, name: str, model: ModelArchitecture, scenario: Scenario, hand_over: HandOver) -> None:
        """Build both models and the plan.

        Raises:
            ConfigError: megatron-core's planner or one of the two models does not support these sizes, or the backend
                is not installed.
        """
        self.name, self.hand_over = name, hand_over
        if name == NCCL_M2N:
            _require_m2n()
        train, gen = megatron_grids(scenario)
        rank, dtype = dist.get_rank(), next(iter(scenario.sources[0].tensors.values())).dtype
        needs = trainer_layouts(model, gen, dtype)
        self.arrangement = Arrangement(strategy=name, needs=dict(enumerate(needs)))
        self._source, self._held = _build(model, train, scenario.sources[rank], dtype)
        self._target, self._served = _build(model, gen, needs[rank], dtype)
        self._service = CountingService((self._source, self._target), _make_service(name))
        clear_plan_cache()  # its key names sizes, not the model
        dist.barrier()
        start = time.perf_counter()
        prepare_swap_model_weights(self._source, self._target)
        self.plan_seconds = time.perf_counter() - start, 0.0
        self._delivered = sum(volume(piece.box) for piece in needs[rank].pieces) * torch_dtype(dtype).itemsize
        self._memory = SyncMemory()
        self._engine = Shard(needs[rank]) if hand_over == "shared-memory" else self._served
        self._local_plan = cached_plan([needs[rank]], {0: needs[rank]}, Topology.single(1), 0, scenario.bucket_bytes)

    def fill(self, sync: int) -> None:
        """Fill the source with the weights of sync `sync`, and the destination with NaN."""
        with torch.no_grad():
            self._held.fill(sync)
            self._served.fill_nan()
            self._engine.fill_nan()

    def push(self) -> SyncStats:
        """Move the weights; return the counted statistics."""
        swap_model_weights(self._source, self._target, self._service)
        buckets = self._load_engine() if self._engine is not self._served else None
        service = self._service
        return SyncStats(
            bytes_sent=service.bytes_sent,
            bytes_received=sum(service.received_from.values()),
            bytes_delivered=self._delivered,
            buckets=buckets.buckets if buckets else 0,
            peak_extra_bytes=max(service.allocated_bytes, buckets.peak_extra_bytes if buckets else 0),
            messages=service.messages,
        )

    def _load_engine(self) -> SyncStats:
        """Copy the destination model's parameters to the engine through shared memory."""
        executor = BoxExecutor(0, self._local_plan.rounds, self._local_plan.buffer_sizes, memory=self._memory)
        with torch.no_grad():
            executor.run(self._served.tensors, self._engine)
        return executor.transport.stats

    def mismatched_bytes(self, sync: int) -> int:
        """Return the number of wrong bytes at this rank's destination."""
        with torch.no_grad():
            return self._engine.mismatched_bytes(sync)

    def received_from(self) -> dict[int, int]:
        """Return, by source rank, the bytes received from it in the last push."""
        return self._service.received_from

    def close(self) -> None:
        """Free the buckets and process groups; the models are freed with the object."""
        self._memory.close()
        ours = [*vars(self._source.pg_collection).values(), *vars(self._target.pg_collection).values()]
        groups = {id(group): group for group in [*ours, self._service.group]}
        for group in groups.values():
            if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class CountingService(CopyService):  # type: ignore[misc]
    """One of megatron-core's copy services, that of the ranks' backend, with counts of its last run."""

    def __init__(self, models: Sequence[torch.nn.Module], service: CopyService) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}
        self._service, self._rank = service, dist.get_rank()
        self._sends: list[tuple[int, torch.Tensor]] = []
        self._receives: list[tuple[int, torch.Tensor]] = []
        self.bytes_sent = self.messages = self.allocated_bytes = 0
        self.received_from: dict[int, int] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that the service has created, if any."""
        return getattr(self._service, "gloo_pg", None)

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        """Queue a message to any rank; the number matches the two ends of one to this rank."""
        self._sends.append((dest_rank, src_tensor))
        self._service.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        """Queue a message from any rank."""
        self._receives.append((src_rank, dest_tensor))
        self._service.submit_recv(dest_tensor, src_rank, task_id)

    def run(self) -> None:
        """Count, then run the queued operations; transfers from a rank to itself count as memory only."""
        self.bytes_sent = sum(tensor.nbytes for peer, tensor in self._sends if peer != self._rank)
        self.received_from = {}
        for peer, tensor in self._receives:
            if peer != self._rank:
                self.received_from[peer] = self.received_from.get(peer, 0) + tensor.nbytes
        self.messages = sum(peer != self._rank for peer, _ in self._receives)
        tensors = [tensor for _, tensor in (*self._sends, *self._receives)]
        buffers = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in self._parameters]
        self.allocated_bytes = sum(tensor.nbytes for tensor in buffers)
        self._sends, self._receives = [], []
        self._service.run()


def _make_service(name: str) -> CopyService:
    if name == NCCL_M2N:
        return get_or_create_service(NCCL_M2N)
    return NCCLCopyService() if platform.is_cuda() else GlooCopyService()


def _require_m2n() -> None:
    """Raise ConfigError if megatron-core has no backend for NCCL M2N, or the ranks have no GPU."""
    backends = get_args(RefitBackendName)
    if NCCL_M2N not in backends:
        installed = importlib.metadata.version("megatron-core")
        raise ConfigError(f"not installed: megatron-core {installed} has the backends {', '.join(backends)}")
    if not platform.is_cuda():
        raise ConfigError("NCCL M2N needs GPUs")


def _build(model: ModelArchitecture, grid: RankGrid, layout: WeightLayout, dtype: str) -> tuple[torch.nn.Module, Shard]:
    """Build this rank's stage; return it with its parameters under the layout's names."""
    parallel_state.initialize_model_parallel(grid.tp, grid.pp, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # required by megatron-core, although values are filled in later
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parallel = ParallelConfig(tp=grid.tp, pp=grid.pp)
    backend = layer_backend(model, MegatronConfig(), torch_dtype(dtype))
    config = transformer_config(model, parallel, torch_dtype(dtype), RecomputeConfig())
    head = HeadOptions(temperature=1.0, fused=False, fp32=False)
    (chunk,) = build_chunks(model, config, groups, EVEN, backend=backend, head=head)
    chunk.module.pg_collection = groups
    shard = Shard(layout, view_weights(find_weights(model, [chunk])))
    parallel_state.destroy_model_parallel()  # the other side creates its own groups
    return chunk.module, shard
