"""Splitting of requests over data-parallel replicas: every rank gets the samples that it had been given by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import ray

from megarl.batch.balance import QWEN2_5_7B, plan_micro_batches
from megarl.batch.pack import padded_length
from megarl.batch.sample_table import SampleKey, SampleRef, SampleTable
from megarl.functional.losses import Denominators
from megarl.megatron.request_split import (
    computed_column,
    forward_dispatch,
    plan_replicas,
    split_by_dp,
    split_forward_by_dp,
    train_dispatch,
)
from megarl.megatron.requests import ForwardRequest, MiniBatch, TrainRequest, TrainStats
from megarl.megatron.token_column import ComputedColumn, merge_column
from megarl.megatron.training.samples import StepSamples, payloads_by_index
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import LocalPayload, RemoteResults, StoredItem, StoredPayload

GRIDS = [
    RankGrid(),
    RankGrid(dp=2),
    RankGrid(tp=2),
    RankGrid(dp=3, pp=2),
    RankGrid(tp=2, dp=4),
    RankGrid(tp=2, dp=2, pp=2),
]
MAX_TOKENS = 300


@dataclass(frozen=True, eq=False)
class FakeRef:
    """Stands in for a ray.ObjectRef; `value` is what is stored."""

    value: Any


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[list[FakeRef]]:
    """Return the list of the calls of `ray.get`."""
    calls: list[list[FakeRef]] = []

    def get(refs: list[FakeRef]) -> list[Any]:
        calls.append(refs)
        return [ref.value for ref in refs]

    monkeypatch.setattr(ray, "get", get)
    return calls


def value_of(payload: int, index: int) -> str:
    return f"trajectory {payload}/{index}"


def make_request(num_mini_batches: int = 3, seed: int = 0, per_unit: int = 1) -> TrainRequest:
    """Return a request over groups of 8 samples, of which mini-batches contain some, and some twice."""
    rng = np.random.default_rng(seed)
    batches, first = [], 0
    for _ in range(num_mini_batches):
        keys = [(first + i // 8, i % 8) for i in range(per_unit * int(rng.integers(1, 40)))]
        first = keys[-1][0] + 1
        keys += keys[: 2 * per_unit]
        samples = tuple(
            SampleRef(
                payload=p, index=i, num_tokens=int(rng.integers(2, 350)), scalars={"advantages": float(rng.normal())}
            )
            for p, i in keys
        )
        batches.append(MiniBatch(samples=samples, denominators=Denominators(num_tokens=99, num_sequences=len(samples))))
    payloads: Any = tuple(StoredPayload(FakeRef([value_of(p, i) for i in range(8)])) for p in range(first))
    return TrainRequest(
        mini_batches=tuple(batches),
        payloads=payloads,
        max_tokens_per_micro_batch=MAX_TOKENS,
        sequences_per_unit=per_unit,
    )


def sample_refs(lengths: Mapping[SampleKey, int], **scalars: float) -> tuple[SampleRef, ...]:
    return tuple(SampleRef(payload=p, index=i, num_tokens=n, scalars=scalars) for (p, i), n in lengths.items())


def one_batch(samples: Sequence[SampleRef], payloads: Any, max_tokens: int = MAX_TOKENS, **fields: Any) -> TrainRequest:
    batch = MiniBatch(samples=samples, denominators=Denominators(num_tokens=9, num_sequences=len(samples)))
    return TrainRequest(mini_batches=(batch,), payloads=payloads, max_tokens_per_micro_batch=max_tokens, **fields)


def all_keys(samples: Sequence[SampleRef]) -> list[SampleKey]:
    return [sample.key for sample in samples]


def plan_by_brute_force(samples: Sequence[SampleRef], grid: RankGrid, per_unit: int = 1) -> list[list[list[SampleRef]]]:
    """Return the samples of each micro-batch by replica, sample by sample: `[dp][micro-batch]`."""
    units = [samples[i : i + per_unit] for i in range(0, len(samples), per_unit)]
    lengths = [sum(padded_length(sample.num_tokens, grid.cp) for sample in unit) for unit in units]
    plan = plan_micro_batches(lengths, dp=grid.dp, max_tokens=MAX_TOKENS, cost=QWEN2_5_7B)
    return [[[sample for unit in of for sample in units[unit]] for of in micro_batches] for micro_batches in plan]


def micro_batches_of(batch: MiniBatch | ForwardRequest) -> list[list[SampleRef]]:
    return [[batch.samples[i] for i in indices] for indices in batch.micro_batches]


@pytest.mark.parametrize("grid", [*GRIDS, RankGrid(cp=2, dp=2)], ids=repr)
@pytest.mark.parametrize("per_unit", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_every_rank_gets_the_micro_batches_of_its_replica(grid: RankGrid, seed: int, per_unit: int) -> None:
    request = make_request(seed=seed, per_unit=per_unit)
    requests = split_by_dp(request, grid)
    assert len(requests) == grid.size
    for number, batch in enumerate(request.mini_batches):
        expected = plan_by_brute_force(batch.samples, grid, per_unit)
        assert len({len(micro_batches) for micro_batches in expected}) == 1
        for rank, found in enumerate(requests):
            own = found.mini_batches[number]
            assert micro_batches_of(own) == expected[grid.coordinates(rank).dp]
            assert len(own.samples) == sum(map(len, own.micro_batches))
            assert own.denominators == batch.denominators


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_every_rank_gets_the_forward_micro_batches_of_its_replica(grid: RankGrid) -> None:
    samples = make_request().mini_batches[0].samples
    request = ForwardRequest(samples=samples, payloads=make_request().payloads, max_tokens_per_micro_batch=MAX_TOKENS)
    expected = plan_by_brute_force(samples, grid)
    for rank, found in enumerate(split_forward_by_dp(request, grid)):
        assert micro_batches_of(found) == expected[grid.coordinates(rank).dp]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_ranks_of_one_replica_get_the_same_object(grid: RankGrid) -> None:
    """So that it is serialized once."""
    requests = split_by_dp(make_request(), grid)
    assert len({id(request) for request in requests}) == grid.dp
    for rank in range(grid.size):
        assert requests[rank] is requests[grid.output_rank(grid.coordinates(rank).dp)]
    for dispatch in (train_dispatch(QWEN2_5_7B), forward_dispatch(QWEN2_5_7B)):
        assert dispatch.by_reference
        assert dispatch.equal_work


def test_replicas_need_few_stored_objects() -> None:
    """64 groups in 16 objects; neighboring payloads are in different ones."""
    rng, stored = np.random.default_rng(0), [FakeRef(None) for _ in range(16)]
    samples = sample_refs({(p, i): int(rng.integers(1000, 2000)) for p in range(64) for i in range(16)})
    payloads = tuple(StoredItem(stored[p % 16], p // 16) for p in range(64))
    request = one_batch(samples, payloads, 8192, payload_blocks=[p % 16 for p in range(64)])
    requests = split_by_dp(request, RankGrid(dp=4))
    num_objects = [len({payload.refs for payload in payloads_by_index(own).values()}) for own in requests]
    assert all(4 <= num <= 6 for num in num_objects)
    assert all(not own.payload_blocks for own in requests)
    assert sorted(key for own in requests for key in all_keys(own.mini_batches[0].samples)) == all_keys(samples)
    by_group = split_by_dp(replace(request, payload_blocks=()), RankGrid(dp=4))
    assert all(16 <= len(payloads_by_index(own)) <= 18 for own in by_group)


@pytest.mark.parametrize("ep", [1, 2])
def test_micro_batches_do_not_depend_on_how_groups_are_stored(ep: int) -> None:
    """Which groups finish, and are stored, together differs from run to run; a resumed run is bitwise the same."""
    rng = np.random.default_rng(1)
    samples = sample_refs({(p, i): int(rng.integers(1000, 2000)) for p in range(128) for i in range(8)})
    grid = RankGrid(dp=2, ep=ep)
    found = []
    for _ in range(5):
        order = rng.permutation(128)
        stored = [FakeRef(None) for _ in range(int(rng.integers(16, 128)))]
        payloads: Any = tuple(StoredItem(stored[p % len(stored)], int(p) // len(stored)) for p in order)
        request = one_batch(samples, payloads, 8192, payload_blocks=[p // 4 for p in range(128)])
        forward = ForwardRequest(
            samples=samples, payloads=payloads, payload_blocks=request.payload_blocks, max_tokens_per_micro_batch=8192
        )
        plan_replicas.cache_clear()
        trained = [
            (all_keys(own.samples), own.micro_batches) for r in split_by_dp(request, grid) for own in r.mini_batches
        ]
        scored = [(all_keys(own.samples), own.micro_batches) for own in split_forward_by_dp(forward, grid)]
        found.append((trained, scored))
    assert all(each == found[0] for each in found)


def test_totals_count_the_samples_of_all_replicas() -> None:
    request = make_request()
    lengths = [sample.num_tokens for batch in request.mini_batches for sample in batch.samples]
    for found in split_by_dp(request, RankGrid(dp=4)):
        assert found.totals is not None
        assert found.totals.num_tokens == sum(lengths)
        assert found.totals.forward_flops == sum(map(QWEN2_5_7B.flops, lengths))


def test_a_rank_fetches_the_payloads_and_parts_of_its_samples_in_one_call(fetches: list[list[FakeRef]]) -> None:
    grid, request = RankGrid(tp=2, dp=4), make_request(num_mini_batches=1, seed=1)
    batch = replace(request.mini_batches[0], samples=request.mini_batches[0].samples[:-2])  # without repeated ones
    request = replace(request, mini_batches=(batch,))
    forward = ForwardRequest(samples=batch.samples, payloads=request.payloads, max_tokens_per_micro_batch=200)
    parts = [
        {sample.key: np.full(sample.num_tokens, value_number(sample.key), np.float32) for sample in own.samples}
        for own in (split_forward_by_dp(forward, grid)[grid.output_rank(dp)] for dp in range(grid.dp))
    ]
    results: Any = RemoteResults(tuple(map(FakeRef, parts)))
    column = computed_column(forward, results, grid, cost=QWEN2_5_7B)
    found = split_by_dp(replace(request, columns={"values": column}), grid)
    fetched_parts = 0
    for rank in range(grid.size):
        fetches.clear()
        own = found[rank].mini_batches[0].samples
        samples = StepSamples.fetch(found[rank])
        assert len(fetches) == 1
        assert set(samples.trajectories) == {sample.payload for sample in own}
        needed = [part for part in parts if part.keys() & set(all_keys(own))]
        assert len(fetches[0]) == len(samples.trajectories) + len(needed)
        fetched_parts += len(needed)
        for sample in own:
            assert samples.trajectory(sample) == value_of(*sample.key)
            assert samples.column("values", sample)[0] == value_number(sample.key)  # type: ignore[index]
    assert fetched_parts > 0


def value_number(key: SampleKey) -> float:
    return 100.0 * key[0] + key[1]


def test_a_selected_column_has_only_the_parts_that_hold_a_sample() -> None:
    keys = [np.array([(0, 0), (2, 1)]), np.array([(1, 0)]), np.array([(0, 1), (5, 7)])]
    column = ComputedColumn.of(["a", "b", "c"], keys)
    assert column.select(np.array([(5, 7), (0, 0), (5, 7)])).refs == ("a", "c")
    assert column.select(np.array([(5, 7), (0, 0)])).select(np.array([(0, 0)])).refs == ("a",)


def test_values_in_this_process_are_split_as_well() -> None:
    """Rows of a supervised stage are in the controller: a replica is sent its own."""
    rows = [f"row {i}" for i in range(6)]
    column = LocalPayload([{(0, i): np.full(100, i, np.float32) for i in range(6)}])
    samples = sample_refs({(0, i): 100 for i in range(6)})
    request = one_batch(samples, (LocalPayload(rows),), columns={"ref": column})
    seen: list[int] = []
    for found in split_by_dp(request, RankGrid(dp=3)):
        own = [sample.index for sample in found.mini_batches[0].samples]
        payloads = found.payloads
        assert isinstance(payloads, Mapping)
        assert payloads[0].fetch() == {i: rows[i] for i in own}
        assert sorted(merge_column(found.columns["ref"].fetch())) == [(0, i) for i in own]
        seen += own
    assert sorted(seen) == list(range(6))


def test_a_replica_without_samples_gets_the_columns_of_the_others() -> None:
    """All replicas pack the same columns, as their ranks run the same loss."""
    request = one_batch(sample_refs({(0, 0): 9, (0, 1): 9}, advantages=1.0), (StoredPayload("ref"),), 9)
    batches = [found.mini_batches[0] for found in split_by_dp(request, RankGrid(dp=3))]
    assert sorted(len(batch.samples) for batch in batches) == [0, 1, 1]
    assert all(list(SampleTable.of(batch.samples).scalars) == ["advantages"] for batch in batches)
    assert len({len(batch.micro_batches) for batch in batches}) == 1


def test_tokens_are_balanced_over_replicas() -> None:
    rng = np.random.default_rng(4)
    samples = sample_refs({(0, i): int(n) for i, n in enumerate(rng.integers(50, 200, 64))})
    request = one_batch(samples, (StoredPayload("ref"),), 1000)
    loads = [SampleTable.of(one.mini_batches[0].samples).num_tokens for one in split_by_dp(request, RankGrid(dp=4))]
    assert max(loads) - min(loads) <= 0.05 * max(loads)


def test_train_result_comes_from_the_last_stage_of_the_first_replica() -> None:
    grid = RankGrid(tp=2, dp=2, pp=2)
    results = [TrainStats(metrics={"rank": rank}, num_tokens=1) for rank in range(8)]
    assert train_dispatch(QWEN2_5_7B).collect(results, grid).metrics == {"rank": 4}
