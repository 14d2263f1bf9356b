"""Measures the plan of one scheme for one batch.

Costs follow from the model's sizes (`SequenceCost`) and include the computation on padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from time import perf_counter

from benchmarks.packing.lengths import PackingWorkload
from benchmarks.packing.schemes import PADDED, SCHEMES
from megarl.batch.balance import SequenceCost

PACK_ALIGN = 8
"""The tokens of a pack are padded to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """Results of one scheme on one batch."""

    lengths: str
    """Name of the workload."""
    model: str
    """Name of the model whose sizes give the costs."""
    seed: int
    sequences: int
    ranks: int
    max_tokens: int
    """Token budget of a micro-batch."""
    align: int
    """Each sequence is padded to a multiple of this."""
    scheme: str
    micro_batches: int
    """Number of micro-batches per rank."""
    micro_batches_bound: int
    """Lower bound: ceil(aligned tokens / (ranks * max_tokens))."""
    padding_percent: float
    """Padding in percent of the tokens that the model processes."""
    fill_percent: float
    """Tokens without padding, in percent of ranks * micro_batches * max_tokens."""
    fullest_percent: float
    """Tokens of the fullest micro-batch with several sequences, in percent of max_tokens."""
    cost_max_over_mean: float
    """Maximum over mean of the ranks' total costs."""
    step_cost: float
    """Sum over micro-batches of the largest cost of a rank, times ranks, over the cost without padding; optimum 1."""
    plan_seconds: float


def measure(
    scheme: str, workload: PackingWorkload, *, model: str, cost: SequenceCost, ranks: int, align: int, seed: int
) -> PackingReport:
    """Plan with `scheme` and measure the plan."""
    lengths = workload.lengths_N.tolist()
    aligned = [_round_up(n, align) for n in lengths]
    started = perf_counter()
    plan = SCHEMES[scheme](aligned, ranks, workload.max_tokens, cost)
    seconds = perf_counter() - started
    if scheme == PADDED:
        aligned = [max(aligned)] * len(aligned)
    contents = [[[aligned[i] for i in micro_batch] for micro_batch in rank] for rank in plan]
    packs = [[content + _pack_padding(sum(content)) for content in rank] for rank in contents]
    costs = [[sum(map(cost.flops, pack)) for pack in rank] for rank in packs]
    processed = sum(sum(pack) for rank in packs for pack in rank)
    per_rank = [sum(rank) for rank in costs]
    step = sum(max(rank[k] for rank in costs) for k in range(len(plan[0])))
    shared = [sum(content) for rank in contents for content in rank if len(content) > 1]
    capacity = ranks * workload.max_tokens
    return PackingReport(
        lengths=workload.name,
        model=model,
        seed=seed,
        sequences=len(lengths),
        ranks=ranks,
        max_tokens=workload.max_tokens,
        align=align,
        scheme=scheme,
        micro_batches=len(plan[0]),
        micro_batches_bound=-(-sum(_round_up(n, align) for n in lengths) // capacity),
        padding_percent=100 * (1 - sum(lengths) / processed),
        fill_percent=100 * sum(lengths) / (len(plan[0]) * capacity),
        fullest_percent=100 * max(shared, default=0) / workload.max_tokens,
        cost_max_over_mean=max(per_rank) / mean(per_rank),
        step_cost=step * ranks / sum(map(cost.flops, lengths)),
        plan_seconds=seconds,
    )


def _pack_padding(num_tokens: int) -> list[int]:
    """Return the padding sequence that ends a pack of `num_tokens`; an empty pack consists only of padding."""
    padding = PACK_ALIGN if num_tokens == 0 else -num_tokens % PACK_ALIGN
    return [padding] if padding else []


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
