"""Messages between the controller and the trainer workers: specs, requests and results.

Imports nothing heavy, because the controller imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

from megarl.batch.balance import QWEN2_5_7B, SequenceCost, plan_micro_batches
from megarl.batch.pack import ColumnName, PerToken, padded_length
from megarl.batch.trajectory import Trajectory
from megarl.checkpoint.run_lock import LockClaim
from megarl.config.limits import LimitConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.config.weight_sync import WeightSyncConfig
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout
from megarl.workers.dispatch import Dispatch, from_output_rank, to_all
from megarl.workers.payload import Payload

if TYPE_CHECKING:
    from megarl.functional.losses import Denominators
    from megarl.megatron.losses.loss import AnyLoss
    from megarl.reshard.planning.disaggregated import TransferSpec
    from megarl.reshard.planning.strategy import Sinks, SyncStats


def _sft_loss() -> AnyLoss:
    from megarl.megatron.losses.supervised import SftLoss  # imports torch

    return SftLoss()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What each rank builds its shard of a model from."""

    model_path: str
    """Folder in Hugging Face format."""
    family: str | None = None
    """Import path of the model's family, if that is outside the package."""
    dtype: str
    """`auto`, `float32` or `bfloat16`."""
    parallel: ParallelConfig
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    weights: Literal["hf", "none"] = "hf"
    """`none`: parameters stay uninitialized; the caller loads them."""
    head: Literal["lm", "value"] = "lm"
    """`value`: one scalar per token instead of logits. The head starts from zeros if the folder is a language model."""
    temperature: float = 1.0
    """Sampling temperature: logits are divided by it before log-probabilities are taken."""
    offload_when_idle: bool = False
    """Keep everything in host memory between calls, because other models use the same devices."""
    seed: int = 0
    timeout_seconds: float = 600.0
    """Timeout of a collective, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a `TrainerWorker` is built from."""

    model: ModelSpec
    optimizer: OptimizerConfig
    optimizer_steps: int
    """Optimizer steps of the whole run, which set the length of the learning-rate schedule."""
    claim: LockClaim | None = None
    """The run's claim to its folder, without which no model is exported; None: the folder is not locked."""


SampleKey = tuple[int, int]
"""Identifies a trajectory of a step: (payload index, index within that payload)."""

TokenColumn = Sequence[Mapping[SampleKey, PerToken]]
"""Per-token values, [num_tokens] for each sample; one mapping for each worker that computed a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """Reference to one trajectory, with the per-sequence values that the controller computed."""

    payload: int
    """Index into the `payloads` of the request."""
    index: int
    """Index of the trajectory within that payload."""
    num_tokens: int
    scalars: Mapping[ColumnName, float] = field(default_factory=dict)
    """Columns with one value for the whole sequence, such as its advantage."""

    @property
    def key(self) -> SampleKey:
        """The (payload, index) pair that identifies the trajectory within the step."""
        return self.payload, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step."""

    samples: tuple[SampleRef, ...]
    denominators: Denominators
    """Token and sequence counts over all data-parallel ranks, not only over this rank's `micro_batches`."""
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into `samples`; set by dispatch."""


LOGPROB_MISMATCH = "train_infer_mismatch/logprob_abs_max"
"""Metric: largest |trainer - engine| log-probability of a sampled token before the first update."""

MISMATCH_MESSAGE = "trainer and engine disagree about the log-probability of a sampled token"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGuardSpec:
    """Checks made before each update of a step. All ranks see the same values and decide alike.

    A rejected update leaves weights and optimizer state bitwise unchanged. Action `skip` continues with the next
    update, `stop` raises LimitError. The learning-rate schedule advances for rejected updates too, so that it ends at
    the planned step.
    """

    not_finite: Literal["skip", "stop"] = "stop"
    """Action if the loss or the gradient is NaN or infinite."""
    grad_norm: LimitConfig | None = None
    """Limit on the gradient norm before clipping; action `warn` does nothing here."""
    mismatch: LimitConfig | None = None
    """Limit on |trainer - engine| log-probability before the step's first update. A violation rejects all updates of
    the step; action `warn` does nothing here."""
    dump_folder: str | None = None
    """Folder for dumps of rejected batches: the step's first skipped one, and one that stops the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Request to train on the samples of one controller step."""

    mini_batches: tuple[MiniBatch, ...]
    """One optimizer step each, in this order."""
    payloads: tuple[Payload[Sequence[Trajectory]], ...]
    max_tokens_per_micro_batch: int
    loss: AnyLoss = field(default_factory=_sft_loss)
    columns: Mapping[ColumnName, Payload[TokenColumn]] = field(default_factory=dict)
    """Columns with one value per token."""
    epochs: int = 1
    """Number of passes over the mini-batches."""
    sequences_per_unit: int = 1
    """Number of consecutive samples that must share a micro-batch: 2 for preference pairs."""
    guard: UpdateGuardSpec = UpdateGuardSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Request for a forward pass over trajectories, without gradients."""

    samples: tuple[SampleRef, ...]
    payloads: tuple[Payload[Sequence[Trajectory]], ...]
    max_tokens_per_micro_batch: int
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into `samples`; set by dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStats:
    """Metrics of one training step, reduced over all ranks."""

    metrics: dict[str, float]
    num_tokens: int
    """Tokens of all samples, prompts included, counted once per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSetup:
    """Configuration of weight sync, except the layouts of the trainer ranks, which they exchange among themselves."""

    config: WeightSyncConfig
    sinks: Mapping[int, Sinks]
    """By trainer rank: the engines that it delivers to."""
    nodes: tuple[int, ...] = ()
    """By trainer rank: index of its node. Empty: all ranks are on one node."""
    needs: Mapping[int, WeightLayout] = field(default_factory=dict)
    """By trainer rank: the weight layout of the engine rank that it serves."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Trainer ranks of each micro-DP group."""
    full_tensors: tuple[str, ...] = ()
    """Tensors that engines receive in full, while all others are sent as boxes."""
    transfer_spec: TransferSpec | None = None
    """Set if the engine ranks receive the weights themselves; then only `config` of the fields above is used. The
    trainer fills in its `sources`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousInfo:
    """What engine ranks that receive the weights themselves need to connect to the trainer."""

    transfer_spec: TransferSpec
    host: str
    port: int
    """Port of the TCP store used for rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Request to save the training state."""

    folder: str
    """Created if missing; files in it are overwritten."""
    asynchronous: bool = False
    """Write the files in the background while training continues."""
    max_staging_bytes: int | None = None
    """Host memory per rank for data staged for background writes, in bytes; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """Result of starting a save, over all ranks."""

    staging_bytes: int
    """Host memory that holds data staged for writing. It is kept between saves."""
    bytes: int
    """Size of the tensors as they will be written."""
    seconds: float
    """How long training was blocked: the maximum over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A checkpoint file that has been written."""

    name: str
    """Path relative to the checkpoint folder."""
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShard:
    """The files that one rank of a model has written, or all its ranks."""

    files: tuple[SavedFile, ...]
    write_seconds: float
    """Time spent writing: the maximum over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of loading a training state."""

    same_layout: bool
    """True if the state was saved in this parallel layout. Then the random number generators resume too; otherwise
    they stay as seeded at startup."""
    bytes: int
    """Bytes read, over all ranks."""


def plan_replica_micro_batches(
    lengths: Sequence[int], grid: RankGrid, *, max_tokens: int, cost: SequenceCost
) -> list[tuple[tuple[int, ...], ...]]:
    """Plan the micro-batches of each data-parallel replica, as indices into `lengths`, in tokens."""
    padded = [padded_length(n, grid.cp) for n in lengths]
    plan = plan_micro_batches(padded, dp=grid.dp, max_tokens=max_tokens, cost=cost)
    return [tuple(map(tuple, micro_batches)) for micro_batches in plan]


def split_by_dp(request: TrainRequest, grid: RankGrid, *, cost: SequenceCost = QWEN2_5_7B) -> list[TrainRequest]:
    """Return one request per rank, with its replica's micro-batches: balanced by cost, equally many on every rank."""
    per_replica: list[list[MiniBatch]] = [[] for _ in range(grid.dp)]
    for batch in request.mini_batches:
        plan = _plan(batch.samples, grid, request.max_tokens_per_micro_batch, cost, request.sequences_per_unit)
        for replica, micro_batches in enumerate(plan):
            per_replica[replica].append(replace(batch, micro_batches=micro_batches))
    requests = [replace(request, mini_batches=tuple(batches)) for batches in per_replica]
    return [requests[grid.coordinates(rank).dp] for rank in range(grid.size)]


def split_forward_by_dp(
    request: ForwardRequest, grid: RankGrid, *, cost: SequenceCost = QWEN2_5_7B
) -> list[ForwardRequest]:
    """Return one request per rank, with its replica's micro-batches."""
    plan = _plan(request.samples, grid, request.max_tokens_per_micro_batch, cost)
    requests = [replace(request, micro_batches=micro_batches) for micro_batches in plan]
    return [requests[grid.coordinates(rank).dp] for rank in range(grid.size)]


def _plan(
    samples: Sequence[SampleRef], grid: RankGrid, max_tokens: int, cost: SequenceCost, sequences_per_unit: int = 1
) -> list[tuple[tuple[int, ...], ...]]:
    """Plan each replica's micro-batches as indices into `samples`; keeps units of consecutive samples together."""
    assert len(samples) % sequences_per_unit == 0, f"{len(samples)} % {sequences_per_unit} != 0"
    firsts = range(0, len(samples), sequences_per_unit)
    lengths = [sum(padded_length(s.num_tokens, grid.cp) for s in samples[i : i + sequences_per_unit]) for i in firsts]
    plan = plan_replica_micro_batches(lengths, grid, max_tokens=max_tokens, cost=cost)
    return [
        tuple(
            tuple(sequences_per_unit * unit + k for unit in units for k in range(sequences_per_unit))
            for units in micro_batches
        )
        for micro_batches in plan
    ]


def train_dispatch(cost: SequenceCost) -> Dispatch[TrainRequest, TrainStats]:
    """Split samples over data-parallel replicas and return one rank's result, since the workers reduce the metrics."""
    return Dispatch(partial(split_by_dp, cost=cost), from_output_rank, equal_work=True)


def forward_dispatch(cost: SequenceCost) -> Dispatch[ForwardRequest, Mapping[SampleKey, Any]]:
    """Split samples over data-parallel replicas and merge the results of all replicas."""
    return Dispatch(partial(split_forward_by_dp, cost=cost), _merge, equal_work=True)


def _merge(results: Sequence[Mapping[SampleKey, Any]], _: RankGrid) -> Mapping[SampleKey, Any]:
    merged: dict[SampleKey, Any] = {}
    for result in results:
        merged.update(result)
    return merged


def sum_sync_stats(results: Sequence[SyncStats]) -> SyncStats:
    """Sum sync statistics over ranks; buckets and extra memory are the maximum over ranks."""
    return replace(reduce(add, results), buckets=max(r.buckets for r in results))


SUM_SYNC_STATS: Dispatch[None, SyncStats] = Dispatch(to_all, lambda results, _: sum_sync_stats(results))
"""Call all ranks and sum their sync statistics."""
