"""Worker classes of one Megatron rank: the methods that the controller calls on it.

Imports nothing heavy at module level, because the controller imports it to name these methods.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.batch.pack import PerToken, SampleKey
from megarl.batch.trajectory import Routes
from megarl.checkpoint.run_lock import require_claim
from megarl.cluster.process.process_start import record_imports
from megarl.cluster.workers.dispatch import fetch_all
from megarl.config.trainer import OffloadConfig
from megarl.megatron.request_samples import payloads_by_index
from megarl.megatron.requests import (
    ForwardRequest,
    LoadReport,
    ModelSpec,
    PreparedSync,
    PushRequest,
    PushResult,
    SavedShard,
    SaveRequest,
    SaveStats,
    SyncSetup,
    TrainerSpec,
    TrainRequest,
    TrainStats,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.cluster.workers.dispatch import Payload
    from megarl.losses import ModelOutput
    from megarl.megatron.modeling.megatron_model import MegatronModel
    from megarl.megatron.runtime.offload import OffloadStats
    from megarl.megatron.training.trainer import MegatronTrainer
    from megarl.megatron.weight_sync_worker import WeightSyncWorker
    from megarl.reshard.transfer.process_groups import TransferGroup
    from megarl.reshard.transfer.weight_sums import PartSums

TORCH_MODULES = ("torch", "torch.distributed.tensor", "torch.distributed.checkpoint")
"""What megatron-core imports of torch; imported at low priority, because engines take longer to start than trainers."""


class ForwardWorker(ABC):
    """One rank of a model that runs forward passes. Every method is a collective call on all ranks.

    Results are returned on the output rank of each replica (`RankGrid.output_rank`) and are empty on all others.
    Per-token results are float32 [num_tokens]: entry i belongs to token i given the tokens before it; entry 0 is 0.
    """

    model: MegatronModel
    """This rank's shards of the model."""
    _routes: Mapping[SampleKey, Routes]
    """Of the last request that records them, until they are taken."""

    @property
    def busy_seconds(self) -> float | None:
        """GPU time in seconds of this rank's forward passes so far; None on CPUs, where the thread's CPU time counts.

        Waits for other pipeline stages and for gradients of other replicas are excluded. Collectives within a layer are
        included, so a slow GPU shows on all ranks of its tensor-, context- and expert-parallel groups.
        """
        timer = self.model.forward_timer
        return None if timer is None else timer.seconds()

    @abstractmethod
    def _ensure_onloaded(self) -> None:
        """Bring the weights back to the device if they were offloaded."""

    @abstractmethod
    def _offload_if_idle(self) -> None:
        """Move everything to host memory if the model is configured with `offload_when_idle`."""

    def logprobs(self, request: ForwardRequest) -> Mapping[SampleKey, PerToken]:
        """Return the log-probability of each token, float32 [num_tokens] per sample.

        Entries outside the loss mask are finite and mean nothing: these tokens never reach the language head.
        """
        return {key: _shift_to_next_token(out_1n[0]) for key, out_1n in self._forward(request, _logprobs)}

    def take_routes(self, _: None) -> Mapping[SampleKey, Routes]:
        """Return the routes that the last call of `logprobs` has recorded, on all ranks, and forget them."""
        routes, self._routes = self._routes, {}
        return routes

    def values(self, request: ForwardRequest) -> Mapping[SampleKey, PerToken]:
        """Return the value of the state before each token, float32 [num_tokens] per sample. Value models only."""
        return {key: _shift_to_next_token(out_1n[0]) for key, out_1n in self._forward(request, _values)}

    def scores(self, request: ForwardRequest) -> Mapping[SampleKey, float]:
        """Return the scalar score of each sample: the value at its last token. Value models only."""
        return {key: float(out_1n[0, -1]) for key, out_1n in self._forward(request, _values)}

    def _forward(
        self, request: ForwardRequest, compute: Callable[[ModelOutput], Tensor]
    ) -> Iterator[tuple[SampleKey, Tensor]]:
        """Yield each sample's key and output, float32 [c, num_tokens], on the replica's output rank.

        Args:
            compute: maps the output for this rank's tokens to [c, t].
        """
        self._ensure_onloaded()
        by_index = payloads_by_index(request)
        payloads = dict(zip(by_index, fetch_all(by_index.values()), strict=True))
        refs = [[request.samples[i] for i in indices] for indices in request.micro_batches]
        micro_batches = [[payloads[r.payload][r.index] for r in batch] for batch in refs]
        packs = [self.model.pack(of, routes=self.model.given_routes(of)) for of in micro_batches]
        outputs = self.model.forward_packs(packs, micro_batches, compute)
        if request.records_routes:
            routes = self.model.gather_routes(packs, micro_batches)
            self._routes = dict(zip((ref.key for ref in chain(*refs)), chain(*routes), strict=True))
        groups = self.model.groups
        if self.model.is_last_stage and groups.tp.rank() == groups.cp.rank() == 0:
            for batch, batch_outputs in zip(refs, outputs, strict=True):
                yield from zip((ref.key for ref in batch), batch_outputs, strict=True)
        self._offload_if_idle()


class FrozenWorker(ForwardWorker):
    """One rank of a model whose weights are frozen, such as a reference or reward model."""

    def __init__(self, spec: ModelSpec) -> None:
        with record_imports(*TORCH_MODULES):
            from megarl.megatron.runtime import platform

            platform.prepare()
            from megarl.megatron.modeling.megatron_model import MegatronModel
            from megarl.megatron.runtime.offload import FrozenMemory

        self.model = MegatronModel(spec)
        self._memory = FrozenMemory(self.model)
        self._offload_if_idle()

    def _ensure_onloaded(self) -> None:
        self._memory.onload()

    def _offload_if_idle(self) -> None:
        if self.model.spec.offload_when_idle:
            self._memory.offload()


class TrainerWorker(ForwardWorker):
    """One rank of a model that is trained: the policy, a critic, a reward model."""

    def __init__(self, spec: TrainerSpec) -> None:
        with record_imports(*TORCH_MODULES):
            from megarl.megatron.runtime import platform

            platform.prepare()
            from megarl.megatron.training.metric_sums import Throughput
            from megarl.megatron.training.trainer import MegatronTrainer

        self.spec = spec
        self.trainer: MegatronTrainer = MegatronTrainer(spec)
        """Gradients, optimizer and checkpoints of `model`, and the training step."""
        self.model = self.trainer.model
        self._weight_sync_worker: WeightSyncWorker | None = None
        self._throughput = Throughput.on_this_gpu(self.model) if platform.is_cuda() else None
        self._offload_if_idle()

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Run one training step. Metrics are complete on each replica's output rank (`RankGrid.output_rank`)."""
        from megarl.megatron.training.trainer import traced

        with traced(request.profile):
            began = time.perf_counter()
            stats = self.trainer.train_step(request)
            seconds = time.perf_counter() - began
        if self._throughput is not None:
            stats.metrics.update(self._throughput.metrics(request, seconds))
        self._offload_if_idle()
        return replace(stats, is_save_written=self.trainer.checkpoint.is_written)

    def offload(self, kinds: OffloadConfig) -> OffloadStats:
        """Offload the kinds of state enabled in `kinds`. Returns the bytes that this rank freed.

        The other methods bring back what they need.
        """
        return self.trainer.memory.offload(kinds)

    def prepare_sync(self, setup: Payload[SyncSetup]) -> PreparedSync:
        """Plan the weight sync, in place of an earlier plan; return this rank's part of what engines prepare from."""
        from megarl.megatron.weight_sync_worker import WeightSyncWorker

        if self._weight_sync_worker is not None:
            self._weight_sync_worker.close()
        self._weight_sync_worker = WeightSyncWorker(self.trainer.model, setup.fetch())
        return self._weight_sync_worker.prepared

    def connect_engines(self, transfer_group: TransferGroup) -> None:
        """Connect to the engine ranks that receive the weights themselves; they must connect at the same time."""
        assert self._weight_sync_worker is not None, "connect_engines needs prepare_sync first"
        self._weight_sync_worker.connect(transfer_group)

    def push_weights(self, request: PushRequest | None) -> PushResult:
        """Push the current weights to the engines as planned by `prepare_sync`; return this rank's result."""
        assert self._weight_sync_worker is not None, "push_weights needs prepare_sync first"
        self._ensure_onloaded()
        result = self._weight_sync_worker.push(request or PushRequest())
        self._offload_if_idle()
        return result

    def sum_weights(self, _: None) -> list[PartSums]:
        """Return the sums of what this rank holds of the engines' weights, as the only element of a list."""
        assert self._weight_sync_worker is not None, "sum_weights needs prepare_sync first"
        self._ensure_onloaded()
        return [self._weight_sync_worker.sum_weights()]

    def save_hf(self, folder: str) -> None:
        """Export the model in Hugging Face format to `folder`, with the tokenizer of the initial model.

        Raises:
            DataError: a rank could not write.
            LostLockError: another run has taken over the run folder; a model in `folder` stays as it was.
        """
        from megarl.megatron import hf_export

        self._ensure_onloaded()
        model_path, claim = self.spec.model.model_path, self.spec.claim
        hf_export.save(self.trainer.model, model_path, folder, require_lock=partial(require_claim, claim))
        self._offload_if_idle()

    def begin_save(self, request: SaveRequest) -> SaveStats:
        """Start saving the training state. Returns this rank's statistics; training may continue.

        Write errors are raised by `finish_save`, which must be called before the next save.
        """
        stats = self.trainer.checkpoint.begin_save(request)
        self._offload_if_idle()
        return stats

    def is_save_written(self, _: None) -> bool:
        """True once this rank has written its files, so that `finish_save` need not wait for it. Does not block."""
        return self.trainer.checkpoint.is_written

    def wait_save_written(self, _: None) -> None:
        """Block until this rank has written its files, or has failed to. No collective, which could time out."""
        self.trainer.checkpoint.wait_written()

    def finish_save(self, _: None) -> SavedShard:
        """Wait until all ranks have written their files. Returns this rank's files.

        Raises:
            DataError: a rank failed to write; names the rank, the file and the reason. A new save may be started.
        """
        return self.trainer.checkpoint.finish_save()

    def load_training(self, folder: str) -> LoadReport:
        """Load the training state in `folder`. Returns what this rank read.

        Raises:
            DataError: the state does not fit this model (nothing was changed), or a file is damaged (part of the state
                may have been loaded).
        """
        report = self.trainer.checkpoint.load(Path(folder))
        self._offload_if_idle()
        return report

    def _ensure_onloaded(self) -> None:
        self.trainer.memory.onload_weights()

    def _offload_if_idle(self) -> None:
        if self.model.spec.offload_when_idle:
            self.trainer.memory.offload(OffloadConfig(optimizer=True, gradients=True, weights=True))


def _logprobs(output: ModelOutput) -> Tensor:
    from megarl.losses import token_scores

    return token_scores(output).logprobs_T[None]


def _values(output: ModelOutput) -> Tensor:
    from megarl.losses import token_values

    return token_values(output)[None]


def _shift_to_next_token(outputs_n: Tensor) -> PerToken:
    """Move the output at position i to token i + 1, which it predicts; float32 [n], entry 0 is 0."""
    out: PerToken = np.zeros(len(outputs_n), np.float32)
    out[1:] = outputs_n[:-1].numpy()
    return out
