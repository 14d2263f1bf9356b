"""What the controller sends to trainer workers, and what comes back. Imports nothing heavy: the controller has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import Any, Literal

from megarl.batch.balance import QWEN2_5_7B, SequenceCost, plan_micro_batches
from megarl.batch.pack import Column, PerToken, padded_length
from megarl.batch.trajectory import Trajectory
from megarl.config.algorithms.algorithm import PolicyConfig
from megarl.config.limits import LimitConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.config.weight_sync import WeightSyncConfig
from megarl.functional.losses import Denominators
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.planning.disaggregated import Handover
from megarl.reshard.planning.strategy import Outlets, SyncStats
from megarl.workers.dispatch import Transfer, from_output, to_all
from megarl.workers.payload import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a rank's part of a model is built from."""

    model_path: str
    dtype: str
    """`auto`, `float32` or `bfloat16`."""
    parallel: ParallelConfig
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    weights: Literal["hf", "none"] = "hf"
    """`none`: parameters are left as they come; something else will fill them."""
    head: Literal["lm", "value"] = "lm"
    """`value`: one number a token instead of logits; a language model's folder then starts it from zeros."""
    temperature: float = 1.0
    """Log-probabilities are of the distribution at this sampling temperature."""
    swaps: bool = False
    """Between calls everything is in host memory: other models use the same devices."""
    seed: int = 0
    timeout_seconds: float = 600.0
    """Longest wait in a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a worker is built from."""

    model: ModelSpec
    optimizer: OptimizerConfig
    optimizer_steps: int
    """Over the whole run: the learning-rate schedule's length."""


Key = tuple[int, int]
"""A trajectory of a step: which payload holds it, and where in that."""

TokenColumn = Sequence[Mapping[Key, PerToken]]
"""Values token by token, in as many parts as workers have made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """One trajectory to train on: where it is, and the numbers that the controller decided on."""

    payload: int
    """Index into `TrainWork.payloads`."""
    index: int
    """Index in that payload."""
    num_tokens: int
    scalars: Mapping[Column, float] = field(default_factory=dict)
    """What holds for all of its tokens."""

    @property
    def key(self) -> Key:
        """Where it is."""
        return self.payload, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodLoss:
    """Negative log-likelihood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateLoss:
    """What a policy gradient follows. Columns: advantages; ref_logprobs with a penalty; positive with `nll`."""

    algorithm: PolicyConfig
    length_norm: int
    nll: float = 0.0
    """Factor of the negative log-likelihood of sequences whose `positive` is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnsLoss:
    """A critic's. Columns: values (before the step's first update), returns."""

    clip: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """A reward or cost model's: sequences 2k and 2k + 1 are the better and the worse answer.

    Columns: margins; perhaps signs, see `preference_loss`.
    """

    kind: Literal["reward", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPreferenceLoss:
    """A policy's, from pairs as in `PairLoss`. Columns: ref_logprobs."""

    beta: float
    nll: float = 0.0
    """Factor of the better answer's negative log-likelihood per token: RPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitRewardLoss:
    """An implicit process reward model's. Columns: ref_logprobs, outcomes."""

    beta: float


Loss = LikelihoodLoss | SurrogateLoss | ReturnsLoss | PairLoss | DirectPreferenceLoss | ImplicitRewardLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step."""

    samples: tuple[SampleRef, ...]
    denominators: Denominators
    """Global: of all ranks together, whatever part `micro_batches` names."""
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into `samples`; set by dispatch."""


MISMATCH = "mismatch/logprob_abs_max"
"""The metric of how far trainer and engine are apart."""

DISAGREE = "trainer and engine disagree about the log-probability of a sampled token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What is looked at before each update of a step, on all ranks alike.

    Where it refuses one, weights and optimizer stay as they are, bit for bit; `skip` goes on with the next, `stop`
    raises LimitError. The learning-rate schedule counts updates that were refused too, and ends where it would have.
    """

    not_finite: Literal["skip", "stop"] = "stop"
    """Where the loss or the gradient is NaN or infinite."""
    grad_norm: LimitConfig | None = None
    """Of the gradient before clipping; `warn` changes nothing here."""
    mismatch: LimitConfig | None = None
    """Of |trainer - engine| log-probability before the step's first update, which leaves out all of the step's; `warn`
    changes nothing here."""
    dump_folder: str | None = None
    """Where refused batches are written: the first that is skipped, and the one that ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWork:
    """One controller step."""

    mini_batches: tuple[MiniBatch, ...]
    payloads: tuple[Payload[Sequence[Trajectory]], ...]
    max_tokens_per_micro_batch: int
    loss: Loss = field(default_factory=LikelihoodLoss)
    columns: Mapping[Column, Payload[TokenColumn]] = field(default_factory=dict)
    epochs: int = 1
    """Passes over the mini-batches."""
    together: int = 1
    """Samples that follow one another and share a micro-batch: 2 for pairs."""
    guard: Guard = Guard()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWork:
    """Trajectories to evaluate a model on."""

    samples: tuple[SampleRef, ...]
    payloads: tuple[Payload[Sequence[Trajectory]], ...]
    max_tokens_per_micro_batch: int
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into `samples`; set by dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStats:
    """Metrics of one controller step, reduced over all ranks."""

    metrics: dict[str, float]
    num_tokens: int
    """Tokens that went through the model, prompts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSetup:
    """How the weights travel from now on; everything but the trainer's own layouts, which its ranks exchange."""

    config: WeightSyncConfig
    outlets: Mapping[int, Outlets]
    """By trainer rank that delivers."""
    nodes: tuple[int, ...] = ()
    """By trainer rank, which machine it is on; empty: all on one."""
    needs: Mapping[int, WeightLayout] = field(default_factory=dict)
    """By trainer rank, the layout of the engine rank that it serves."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Micro-DP groups."""
    whole: tuple[str, ...] = ()
    """Tensors that go to engines whole where all others go as boxes."""
    handover: Handover | None = None
    """Where engines receive the weights themselves, which makes of the above all but `config` idle; `sources` are the
    trainer's to fill in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """From the trainer to engines that receive the weights themselves."""

    handover: Handover
    host: str
    port: int
    """Of the store at which all ranks meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """A checkpoint of the training state to write."""

    folder: str
    """Made if it is not there; files in it are overwritten."""
    asynchronous: bool = False
    """Training goes on while files are written."""
    max_staging_bytes: int | None = None
    """Host memory of a rank for what is written in the background; None: as much as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """Of the start of a save; of all ranks together."""

    staging_bytes: int
    """Host memory that holds what is still to be written. It is kept between saves."""
    bytes: int
    """Of the tensors, as they will be in the files."""
    seconds: float
    """How long training was held up: the longest of any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of a checkpoint that is on the disk."""

    name: str
    """Relative to the checkpoint's folder."""
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """What a rank of a model has written, or all of them."""

    files: tuple[SavedFile, ...]
    write_seconds: float
    """The longest of any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Of a training state that was loaded."""

    same_layout: bool
    """It was saved in this layout, and random generators go on too; else they are as seeded at the start."""
    bytes: int
    """Read, by all ranks together."""


def micro_batches_of_replicas(
    lengths: Sequence[int], grid: RankGrid, *, max_tokens: int, cost: SequenceCost
) -> list[tuple[tuple[int, ...], ...]]:
    """By data-parallel replica its micro-batches, as indices into `lengths`; see `plan_micro_batches`."""
    padded = [padded_length(n, grid.cp) for n in lengths]
    plan = plan_micro_batches(padded, dp=grid.dp, max_tokens=max_tokens, cost=cost)
    return [tuple(map(tuple, micro_batches)) for micro_batches in plan]


def split_by_dp(work: TrainWork, grid: RankGrid, *, cost: SequenceCost = QWEN2_5_7B) -> list[TrainWork]:
    """Per rank the same work with its replica's micro-batches: balanced by cost, equally many on every rank."""
    per_replica: list[list[MiniBatch]] = [[] for _ in range(grid.dp)]
    for batch in work.mini_batches:
        plan = _plan(batch.samples, grid, work.max_tokens_per_micro_batch, cost, work.together)
        for replica, micro_batches in enumerate(plan):
            per_replica[replica].append(replace(batch, micro_batches=micro_batches))
    works = [replace(work, mini_batches=tuple(batches)) for batches in per_replica]
    return [works[grid.coordinates(rank).dp] for rank in range(grid.size)]


def split_evaluation(work: EvaluationWork, grid: RankGrid, *, cost: SequenceCost = QWEN2_5_7B) -> list[EvaluationWork]:
    """Per rank the same work with its replica's micro-batches."""
    plan = _plan(work.samples, grid, work.max_tokens_per_micro_batch, cost)
    works = [replace(work, micro_batches=micro_batches) for micro_batches in plan]
    return [works[grid.coordinates(rank).dp] for rank in range(grid.size)]


def _plan(
    samples: Sequence[SampleRef], grid: RankGrid, max_tokens: int, cost: SequenceCost, together: int = 1
) -> list[tuple[tuple[int, ...], ...]]:
    """By replica its micro-batches, as indices into `samples`; each so many neighbours stay together."""
    assert len(samples) % together == 0, f"{len(samples)} % {together} != 0"
    firsts = range(0, len(samples), together)
    lengths = [sum(padded_length(s.num_tokens, grid.cp) for s in samples[i : i + together]) for i in firsts]
    plan = micro_batches_of_replicas(lengths, grid, max_tokens=max_tokens, cost=cost)
    return [
        tuple(tuple(together * unit + k for unit in units for k in range(together)) for units in micro_batches)
        for micro_batches in plan
    ]


def train_transfer(cost: SequenceCost) -> Transfer[TrainWork, TrainStats]:
    """Samples split over data-parallel replicas; one replica's answer, since workers reduce metrics themselves."""
    return Transfer(partial(split_by_dp, cost=cost), from_output)


def evaluation_transfer(cost: SequenceCost) -> Transfer[EvaluationWork, Mapping[Key, Any]]:
    """Samples split over data-parallel replicas, and the answers of all of them."""
    return Transfer(partial(split_evaluation, cost=cost), _merge)


def _merge(results: Sequence[Mapping[Key, Any]], _: RankGrid) -> Mapping[Key, Any]:
    merged: dict[Key, Any] = {}
    for result in results:
        merged.update(result)
    return merged


def total(results: Sequence[SyncStats]) -> SyncStats:
    """What ranks together moved; the most buckets and extra memory of any."""
    return replace(reduce(add, results), buckets=max(r.buckets for r in results))


ADD_UP: Transfer[None, SyncStats] = Transfer(to_all, lambda results, _: total(results))
"""Every rank's part of a push."""
