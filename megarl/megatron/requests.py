"""Messages between the controller and the trainer workers: specs, requests and results.

Imports nothing heavy, because the controller imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from megarl.batch.pack import ColumnName, PerToken, SampleKey, SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.checkpoint.run_lock import LockClaim
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import Dispatch, Payload, to_all
from megarl.config.limits import LimitConfig
from megarl.config.megatron import MegatronConfig, MoeConfig
from megarl.config.rollout import WeightSyncConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.reshard.layout.layout import WeightLayout

if TYPE_CHECKING:
    from megarl.functional.losses import Denominators
    from megarl.losses import AnyLoss
    from megarl.reshard.planning.disaggregated import TransferSpec
    from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
    from megarl.reshard.transfer.box_channel import BoxOffer
    from megarl.reshard.transfer.bucket import WeightSink
    from megarl.reshard.transfer.heartbeat import HeartbeatSpec


def _sft_loss() -> AnyLoss:
    from megarl.losses import SftLoss  # imports torch

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
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Fields of megatron-core's configurations; those of `ddp` and `optimizer` for trained models only."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    weights: Literal["hf", "none"] = "hf"
    """`none`: parameters stay uninitialized; the caller loads them."""
    head: Literal["lm", "value"] = "lm"
    """`value`: one scalar per token instead of logits. The head starts from zeros if the folder is a language model."""
    temperature: float = 1.0
    """Sampling temperature: logits are divided by it before log-probabilities are taken."""
    fused_lm_head: bool | None = None
    """Compute log-probabilities and entropies with the logits of some columns at a time. None: on CUDA."""
    fp32_lm_head: bool = False
    """Compute logits in float32, whatever `dtype` is."""
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


Trajectories = Sequence[Trajectory] | Mapping[int, Trajectory]
"""Trajectories by their index within a payload."""

TokenColumn = Sequence[Mapping[SampleKey, PerToken]]
"""Per-token values, [num_tokens] for each sample, or routes; one mapping for each worker that computed some of them."""


Payloads = Sequence[Payload[Trajectories]] | Mapping[int, Payload[Trajectories]]
"""The trajectories of a step by the payload index of their samples; in the request of a rank those of its replica."""


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
class MiniBatch:
    """The samples of one optimizer step."""

    samples: Sequence[SampleRef]
    """In the request of a rank those of its replica only."""
    denominators: Denominators
    """Token and sequence counts over the samples of all data-parallel replicas."""
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into `samples`; set by dispatch."""


LOGPROB_MISMATCH = "train_infer_mismatch/logprob_abs_max"
"""Metric: largest |trainer - engine| log-probability of a sampled token before the first update."""

RATIO_MEAN = "drift/ratio_mean"
"""Metric: mean of pi_trainer / pi_rollout over the sampled tokens, before the first update."""

RATIO_SQUARE_MEAN = "drift/ratio_square_mean"
"""Metric: mean of its square; with the mean, it gives the effective sample size."""

MISSING_ROUTES = "router_replay/missing_share"
"""Metric: share of tokens without a route of the engines among those that a trained token depends on."""

MISMATCH_METRICS: Mapping[str, str] = {
    "logprob_abs_max": LOGPROB_MISMATCH,
    "logprob_abs_p99": "train_infer_mismatch/logprob_abs_p99",
    "logprob_kl": "train_infer_mismatch/kl",
}
"""By limit, the metric that it bounds."""

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
    mismatch: Mapping[str, LimitConfig] = field(default_factory=dict)
    """Limits of `MISMATCH_METRICS`, before the step's first update. A violation rejects all updates of the step; action
    `warn` does nothing here."""
    mismatch_notes: Mapping[str, str] = field(default_factory=dict)
    """What messages add about each of these limits."""
    dump_folder: str | None = None
    """Folder for dumps of rejected batches: the step's first skipped one, and one that stops the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """A training step that is traced."""

    folder: str
    step: int
    ranks: tuple[int, ...]
    """Ranks that write a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTotals:
    """Sizes of a training request over all data-parallel replicas."""

    num_tokens: int
    """Tokens of all samples, prompts included."""
    forward_flops: int
    """Floating-point operations of one forward pass over all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """Policy versions of the sampled tokens of a step."""

    current: int
    """The version before the first update. Only its tokens are compared with the trainer's log-probabilities."""
    oldest: int
    """Tokens of older versions are not trained on."""
    num_current_tokens: int
    """Number of tokens that are compared, over all mini-batches and replicas."""
    in_place: bool = False
    """Whether weights are pushed in place: tokens after a push within their request are not compared either, since they
    were sampled with the KV cache of older weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Request to train on the samples of one controller step."""

    mini_batches: tuple[MiniBatch, ...]
    """One optimizer step each, in this order."""
    payloads: Payloads
    payload_blocks: Sequence[int] = ()
    """By payload, as in `ForwardRequest`."""
    max_tokens_per_micro_batch: int
    loss: AnyLoss = field(default_factory=_sft_loss)
    columns: Mapping[ColumnName, Payload[TokenColumn]] = field(default_factory=dict)
    """Columns with one value per token."""
    epochs: int = 1
    """Number of passes over the mini-batches."""
    sequences_per_unit: int = 1
    """Number of consecutive samples that must share a micro-batch: 2 for preference pairs."""
    versions: VersionRange | None = None
    """Set if tokens may be of older policies; None: the engines had the weights before the first update."""
    guard: UpdateGuardSpec = UpdateGuardSpec()
    profile: ProfileSpec | None = None
    """Set if the step is traced."""
    totals: RequestTotals | None = None
    """Sizes of the samples of all replicas; set by dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Request for a forward pass over trajectories, without gradients."""

    samples: Sequence[SampleRef]
    """In the request of a rank those of its replica only."""
    payloads: Payloads
    payload_blocks: Sequence[int] = ()
    """By payload, number of the block that is probably stored as one object. Replicas get whole blocks as far as these
    can be balanced. The objects themselves depend on what finished first; micro-batches, and with them rounding, must
    not. Empty: each payload is its own block."""
    max_tokens_per_micro_batch: int
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into `samples`; set by dispatch."""
    records_routes: bool = False
    """Whether ranks keep the routes of the tokens for `ForwardWorker.take_routes`."""


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
class TrainStats:
    """Metrics of one training step, reduced over all ranks."""

    metrics: dict[str, float]
    num_tokens: int
    """Tokens of all samples, prompts included, counted once per sample."""
    is_save_written: bool = True
    """Whether this rank is not writing files of a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSetup:
    """What weight syncs are planned from, except the layouts of the trainer ranks, which they exchange themselves."""

    config: WeightSyncConfig
    receivers: Mapping[int, str] = field(default_factory=dict)
    """By trainer rank: name of the engine rank on its slot, to which it delivers boxes."""
    senders: tuple[int, ...] = ()
    """Trainer ranks that deliver full tensors, ascending."""
    nodes: tuple[int, ...] = ()
    """By trainer rank: index of its node. Empty: all ranks are on one node."""
    needs: Mapping[int, WeightLayout] = field(default_factory=dict)
    """By trainer rank: the layout that the engine rank on its slot receives."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Trainer ranks of each micro-DP group."""
    engine: tuple[WeightLayout, ...] = ()
    """Layouts of an engine by TP rank, to compare its weights; empty if they are not compared."""
    transfer_spec: TransferSpec | None = None
    """Set if the engine ranks receive the weights themselves; then only `config` and `engine` of the fields above are
    used. The trainer fills in its `sources`."""
    heartbeat: HeartbeatSpec | None = None
    """Where trainer ranks that serve colocated engines leave their heartbeats; None: they give none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSync:
    """What the engines prepare from, after all trainer ranks, or one of them, have planned."""

    transfer_spec: TransferSpec | None = None
    """For engine ranks that receive the weights themselves, from rank 0; None if trainer ranks deliver them."""
    offers: Mapping[int, BoxOffer] = field(default_factory=dict)
    """By trainer rank that delivers boxes: what the engine rank on its slot needs to receive them."""


def _merge_prepared(results: Sequence[PreparedSync], _: RankGrid) -> PreparedSync:
    offers = {rank: offer for result in results for rank, offer in result.offers.items()}
    return PreparedSync(transfer_spec=results[0].transfer_spec, offers=offers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """Request to push the current weights; None, which costs less to send, stands for one with the defaults."""

    sinks: Mapping[int, tuple[WeightSink, ...]] = field(default_factory=dict)
    """By trainer rank: the engines to which it delivers full tensors; in the request of a rank its own entry only."""
    skipped: frozenset[int] = frozenset()
    """Trainer ranks whose engine rank takes no part in this push: they drop its boxes."""
    delta: DeltaUpdate | None = None
    """What the push may leave out; None: nothing, and later pushes may not either."""


@dataclass(frozen=True, kw_only=True)  # without slots, as `PushRequest`
class PushResult:
    """Result of a push, over all ranks or of one rank."""

    stats: SyncStats
    undelivered: tuple[str, ...] = ()
    """Why engine ranks have not received all of their boxes, one sentence each; the trainer ranks are not affected."""


def split_push(request: PushRequest | None, grid: RankGrid) -> list[PushRequest | None]:
    """Return the request of each rank."""
    if request is None or not request.sinks:
        return [request] * grid.size
    sinks = request.sinks
    own = ({rank: sinks[rank]} if rank in sinks else {} for rank in range(grid.size))
    return [replace(request, sinks=of_rank) for of_rank in own]


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
class OffloadStats:
    """Bytes moved by one call, and host memory held after it."""

    device_bytes: int
    """Device memory freed by `offload` or allocated by `onload`; 0 if nothing had to move."""
    host_bytes: int
    """Host memory held. It is kept between phases, since pinning memory takes longer than filling it."""

    def __add__(self, other: OffloadStats) -> OffloadStats:
        return OffloadStats(
            device_bytes=self.device_bytes + other.device_bytes, host_bytes=self.host_bytes + other.host_bytes
        )


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


def sum_sync_stats(results: Sequence[SyncStats]) -> SyncStats:
    """Sum sync statistics over ranks; buckets and extra memory are the maximum over ranks."""
    return type(results[0])(
        bytes_sent=sum(r.bytes_sent for r in results),
        bytes_received=sum(r.bytes_received for r in results),
        bytes_delivered=sum(r.bytes_delivered for r in results),
        buckets=max(r.buckets for r in results),
        peak_extra_bytes=max(r.peak_extra_bytes for r in results),
        messages=sum(r.messages for r in results),
        collectives=sum(r.collectives for r in results),
        bytes_not_received=sum(r.bytes_not_received for r in results),
        bytes_not_delivered=sum(r.bytes_not_delivered for r in results),
        count_bytes=sum(r.count_bytes for r in results),
        copied_bytes=sum(r.copied_bytes for r in results),
        elements=sum(r.elements for r in results),
        changed_elements=sum(r.changed_elements for r in results),
    )


def _combine_pushes(results: Sequence[PushResult], _: RankGrid) -> PushResult:
    undelivered = tuple(reason for result in results for reason in result.undelivered)
    return PushResult(stats=sum_sync_stats([result.stats for result in results]), undelivered=undelivered)


PUSH: Dispatch[PushRequest | None, PushResult] = Dispatch(split_push, _combine_pushes)
"""Call all ranks, each with its own sinks, and combine their results."""

PREPARE: Dispatch[Payload[SyncSetup], PreparedSync] = Dispatch(to_all, _merge_prepared)
"""Call all ranks with the same setup."""
