"""Contender `megatron_core`: megatron-core's own resharding between two of its models on the same ranks.

Import this module after `megarl.megatron.runtime.platform.prepare()`.

Both sides are real GPTModels, the destination in Megatron's layout for the sizes of one engine (as in Megatron's own
inference), its stages placed in Megatron's order. The report covers `swap_model_weights`: bytes and messages are
counted where its copy service is about to post them; planning is `build_centralized_reshard_plan` (rank 0 plans for all
ranks and broadcasts; the destination then caches the plan); memory is a lower bound of what it allocates before the
transfer: every slice that is copied to be sent, and every receive buffer once.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding import build_centralized_reshard_plan
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.refit import swap_model_weights

from benchmarks.reshard.content import Shard
from benchmarks.reshard.megatron_limits import megatron_grids, require_megatron_core_support
from benchmarks.reshard.show import MEGATRON_CORE
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.pipeline_stages import EVEN
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.megatron.hf_weights.local_layout import local_tensors
from megarl.megatron.modeling.gpt_model import build_chunks
from megarl.megatron.modeling.transformer_config import transformer_config
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import Arrangement, Scenario
from megarl.reshard.layout.layout import WeightLayout, volume
from megarl.reshard.layout.micro_dp import GenerationPlace
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import torch_dtype


class MegatronCore:
    """The `Contender` that resharding of megarl is compared with."""

    def __init__(self, model: ModelArchitecture, scenario: Scenario) -> None:
        """Build both models and the plan.

        Raises:
            ConfigError: megatron-core's planner or one of the two models does not support these sizes.
        """
        train, gen = megatron_grids(scenario)
        require_megatron_core_support(model, train, gen)
        rank, dtype = dist.get_rank(), next(iter(scenario.sources[0].tensors.values())).dtype
        needs = trainer_layouts(model, gen, dtype)
        self.arrangement = Arrangement(strategy=MEGATRON_CORE, places=_places(gen), needs=dict(enumerate(needs)))
        self._source, self._held = _build(model, train, scenario.sources[rank], dtype)
        self._target, self._served = _build(model, gen, needs[rank], dtype)
        self._service = CountingService(self._source)
        dist.barrier()
        start = time.perf_counter()
        self._target._cached_reshard_plan = build_centralized_reshard_plan(self._source, self._target)
        self.plan_seconds = time.perf_counter() - start, 0.0
        self._delivered = sum(volume(piece.box) for piece in needs[rank].pieces) * torch_dtype(dtype).itemsize

    def fill(self, sync: int) -> None:
        """Fill the source with the weights of sync `sync`, and the destination with NaN."""
        with torch.no_grad():
            self._held.fill(sync)
            self._served.fill_nan()

    def push(self) -> SyncStats:
        """Move the weights; return the counted statistics."""
        swap_model_weights(self._source, self._target, self._service)
        service = self._service
        return SyncStats(
            bytes_sent=service.bytes_sent,
            bytes_received=sum(service.received_from.values()),
            bytes_delivered=self._delivered,
            buckets=0,
            peak_extra_bytes=service.allocated_bytes,
            messages=service.messages,
        )

    def mismatched_bytes(self, sync: int) -> int:
        """Return the number of wrong bytes at this rank's destination."""
        with torch.no_grad():
            return self._served.mismatched_bytes(sync)

    def received_from(self) -> dict[int, int]:
        """Return, by source rank, the bytes received from it in the last push."""
        return self._service.received_from

    def close(self) -> None:
        """Destroy the process groups; the models are freed with the object."""
        ours = [*vars(self._source.pg_collection).values(), *vars(self._target.pg_collection).values()]
        groups = {id(group): group for group in [*ours, self._service.gloo_pg]}
        for group in groups.values():
            if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class CountingService(GlooCopyService):  # type: ignore[misc]
    """megatron-core's copy service for gloo, which also counts what the last run sent and received."""

    def __init__(self, source: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = {p.untyped_storage().data_ptr() for p in source.parameters()}
        self.bytes_sent = self.messages = self.allocated_bytes = 0
        self.received_from: dict[int, int] = {}

    def run(self) -> None:
        """Count, then run the queued operations; transfers from a rank to itself count as memory only."""
        sends = [(op.dest_rank, op.tensor) for op in self.send_ops]
        receives = [(op.src_rank, target) for op, target in self.recv_ops]
        self.bytes_sent = sum(tensor.nbytes for peer, tensor in sends if peer != self.rank)
        self.received_from = {}
        for peer, tensor in receives:
            if peer != self.rank:
                self.received_from[peer] = self.received_from.get(peer, 0) + tensor.nbytes
        self.messages = sum(peer != self.rank for peer, _ in receives)
        copies = [tensor for _, tensor in sends if tensor.untyped_storage().data_ptr() not in self._parameters]
        self.allocated_bytes = sum(tensor.nbytes for tensor in copies) + sum(tensor.nbytes for _, tensor in receives)
        super().run()


def _places(gen: RankGrid) -> dict[int, GenerationPlace]:
    at = {rank: gen.coordinates(rank) for rank in range(gen.size)}
    return {rank: GenerationPlace(c.dp, c.pp, c.tp) for rank, c in at.items()}


def _build(model: ModelArchitecture, grid: RankGrid, layout: WeightLayout, dtype: str) -> tuple[torch.nn.Module, Shard]:
    """Build this rank's stage; return it with its parameters under the layout's names."""
    parallel_state.initialize_model_parallel(grid.tp, grid.pp, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # required by megatron-core, although values are filled in later
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parallel = ParallelConfig(tp=grid.tp, pp=grid.pp)
    config = transformer_config(model, parallel, torch_dtype(dtype), RecomputeConfig())
    (chunk,) = build_chunks(model, config, groups, EVEN, temperature=1.0)
    chunk.module.pg_collection = groups
    shard = Shard(layout, local_tensors([chunk]))
    parallel_state.destroy_model_parallel()  # the other side creates its own groups
    return chunk.module, shard
