"""Requests: split over data-parallel replicas, packed samples, merged results, and the throughput of their steps."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import ray

from megarl.batch.balance import QWEN2_5_7B, SequenceCost, plan_micro_batches
from megarl.batch.pack import SampleKey, SampleRef, SampleTable, padded_length
from megarl.batch.trajectory import Trajectory
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import BROADCAST, LocalPayload, RemoteResults, StoredItem, StoredPayload
from megarl.functional.losses import Denominators
from megarl.megatron import request_samples
from megarl.megatron.request_samples import (
    ComputedColumn,
    StepSamples,
    computed_column,
    merge_column,
    pack_samples,
    payloads_by_index,
    split_by_dp,
    split_forward_by_dp,
    train_dispatch,
)
from megarl.megatron.requests import PUSH, ForwardRequest, MiniBatch, PushRequest, PushResult, TrainRequest, TrainStats
from megarl.megatron.training.metric_sums import Throughput
from megarl.reshard.planning.strategy import SyncStats
from tests.megatron.fidelity.measure import as_trajectory

GRIDS = [
    RankGrid(tp=tp, dp=dp, pp=pp) for tp, dp, pp in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 3, 2), (2, 4, 1), (2, 2, 2))
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

    monkeypatch.setattr(ray, "get", lambda refs: calls.append(refs) or [ref.value for ref in refs])
    return calls


def value_of(payload: int, index: int) -> str:
    return f"trajectory {payload}/{index}"


def mini_batch(samples: Iterable[SampleRef]) -> MiniBatch:
    own = tuple(samples)
    return MiniBatch(samples=own, denominators=Denominators(num_tokens=9, num_sequences=len(own)))


def make_request(num_mini_batches: int = 3, seed: int = 0, per_unit: int = 1) -> TrainRequest:
    """Return a request over groups of 8 samples, of which mini-batches contain some, and some twice."""
    rng = np.random.default_rng(seed)
    batches, first = [], 0
    for _ in range(num_mini_batches):
        keys = [(first + i // 8, i % 8) for i in range(per_unit * int(rng.integers(1, 40)))]
        first = keys[-1][0] + 1
        keys += keys[: 2 * per_unit]
        drawn = [(int(rng.integers(2, 350)), {"advantages": float(rng.normal())}) for _ in keys]
        batches.append(
            mini_batch(
                SampleRef(payload=p, index=i, num_tokens=n, scalars=scalars)
                for (p, i), (n, scalars) in zip(keys, drawn, strict=True)
            )
        )
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
    batches = (mini_batch(samples),)
    return TrainRequest(mini_batches=batches, payloads=payloads, max_tokens_per_micro_batch=max_tokens, **fields)


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
    for dispatch in (train_dispatch(QWEN2_5_7B), request_samples.forward_dispatch(QWEN2_5_7B)):
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
        blocks = {"payload_blocks": [p // 4 for p in range(128)]}
        request = one_batch(samples, payloads, 8192, **blocks)
        forward = ForwardRequest(samples=samples, payloads=payloads, max_tokens_per_micro_batch=8192, **blocks)
        request_samples.plan_replicas.cache_clear()
        parts = [own for of in split_by_dp(request, grid) for own in of.mini_batches]
        parts += split_forward_by_dp(forward, grid)
        found.append([(all_keys(own.samples), own.micro_batches) for own in parts])
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


RNG = np.random.default_rng(0)


def make_trajectory(number: int, index: int) -> Trajectory:
    tokens = RNG.integers(0, 99, int(RNG.integers(2, 9)))
    return replace(
        as_trajectory(tokens, number=number),
        logprobs=RNG.normal(size=len(tokens)).astype(np.float32),
        rewards={"match": 1.0 * index},
        reward=1.0 * index,
        reward_errors={"match": "no answer"} if index == 2 else {},
        finish_reason="length" if index == 1 else "stop",
    )


GROUPS = [[make_trajectory(number, index) for index in range(4)] for number in range(5)]
KEYS: list[SampleKey] = [(3, 1), (0, 2), (3, 0), (4, 3), (0, 2)]
"""One of them twice, as in a request with repeated samples."""


def refs_of(keys: list[SampleKey]) -> tuple[SampleRef, ...]:
    return tuple(SampleRef(payload=p, index=i, num_tokens=GROUPS[p][i].num_tokens) for p, i in keys)


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return {k: (v.dtype, v.tolist()) if isinstance(v, np.ndarray) else v for k, v in values.items()}


def make_packed_request() -> TrainRequest:
    column = [{(p, i): RNG.normal(size=GROUPS[p][i].num_tokens).astype(np.float32) for i in range(4)} for p in range(5)]
    return TrainRequest(
        mini_batches=tuple(mini_batch(refs_of(keys)) for keys in (KEYS[:2], KEYS[2:])),
        payloads={number: LocalPayload(GROUPS[number]) for number in (0, 3, 4)},
        max_tokens_per_micro_batch=9,
        columns={"values": LocalPayload(column)},
    )


def test_samples_and_columns_of_a_training_request_are_unchanged() -> None:
    request = make_packed_request()
    packed = pickle.loads(pickle.dumps(pack_samples(request)))
    before, after = StepSamples.fetch(request), StepSamples.fetch(packed)
    for batch in request.mini_batches:
        for ref in batch.samples:
            assert values_of(after.trajectory(ref)) == values_of(before.trajectory(ref))
            np.testing.assert_array_equal(after.column("values", ref), before.column("values", ref))  # type: ignore[arg-type]
    assert {key: sorted(group) for key, group in after.trajectories.items()} == {0: [2], 3: [0, 1], 4: [3]}  # type: ignore[type-var]
    assert replace(packed, payloads={}, columns={}) == replace(request, payloads={}, columns={})


def test_samples_of_a_forward_request_are_unchanged() -> None:
    payloads: Any = tuple(map(LocalPayload, GROUPS))
    request = ForwardRequest(samples=refs_of(KEYS), payloads=payloads, max_tokens_per_micro_batch=9)
    packed = pack_samples(request)
    found = payloads_by_index(packed)
    for number, index in KEYS:
        assert values_of(found[number].fetch()[index]) == values_of(GROUPS[number][index])
    assert list(found) == [0, 3, 4]


def test_a_replica_without_samples_has_nothing_to_pack() -> None:
    request = ForwardRequest(samples=(), payloads={}, max_tokens_per_micro_batch=9)
    assert pack_samples(request) is request


def test_results_of_a_push_are_combined_over_ranks() -> None:
    first = SyncStats(bytes_sent=3, bytes_received=1, bytes_delivered=4, buckets=2, peak_extra_bytes=10, messages=1)
    second = SyncStats(bytes_sent=1, bytes_received=3, bytes_delivered=5, buckets=3, peak_extra_bytes=7, collectives=2)
    results = [PushResult(stats=first), PushResult(stats=second, undelivered=("engine 0 rank 1 is lost",))]
    total = replace(first, bytes_sent=4, bytes_received=4, bytes_delivered=9, buckets=3, collectives=2)
    combined = PUSH.collect(results, RankGrid(dp=2))
    assert combined == PushResult(stats=total, undelivered=("engine 0 rank 1 is lost",))


def test_ranks_get_only_their_own_sinks() -> None:
    sink: Any = "engine 1"
    request = PushRequest(sinks={1: (sink,)}, skipped=frozenset({0}))
    without = PushRequest(skipped=frozenset({0}))
    assert PUSH.distribute(request, RankGrid(dp=3)) == [without, request, without]
    assert PUSH.distribute(None, RankGrid(dp=3)) == [None] * 3


def test_rank_0_may_have_most_of_the_work_in_a_push_or_an_export() -> None:
    assert (PUSH.equal_work, BROADCAST.equal_work) == (False, False)


def replica_request(*lengths: tuple[int, ...], cost: SequenceCost = QWEN2_5_7B, epochs: int = 1) -> TrainRequest:
    """Return the request of one of two replicas."""
    batches = tuple(mini_batch(SampleRef(payload=0, index=0, num_tokens=n) for n in of) for of in lengths)
    payload: Any = StoredPayload("ref")
    work = TrainRequest(mini_batches=batches, payloads=(payload,), max_tokens_per_micro_batch=8, epochs=epochs)
    return split_by_dp(work, RankGrid(dp=2), cost=cost)[0]


def test_six_operations_per_token_and_parameter_where_attention_is_negligible() -> None:
    cost = SequenceCost(matmul_parameters=7_000_000_000, attention_layers=1, attention_width=1)
    throughput = Throughput(num_gpus=8, peak_flops=989e12)
    metrics = throughput.metrics(replica_request((1000, 3000), (4000,), cost=cost), seconds=0.5)
    assert metrics["throughput/tokens_per_second_per_gpu"] == 8000 / 0.5 / 8
    assert metrics["throughput/tflops_per_gpu"] == pytest.approx(6 * 7e9 * 8000 / 0.5 / 8 / 1e12, rel=1e-5)
    assert metrics["throughput/mfu"] == pytest.approx(metrics["throughput/tflops_per_gpu"] / 989)


def test_every_epoch_counts_operations_and_an_unknown_gpu_has_no_mfu() -> None:
    throughput = Throughput(num_gpus=1, peak_flops=None)
    once, twice = (throughput.metrics(replica_request((100, 50), epochs=n), seconds=2.0) for n in (1, 2))
    assert once.keys() == twice.keys() == {"throughput/tokens_per_second_per_gpu", "throughput/tflops_per_gpu"}
    assert twice["throughput/tflops_per_gpu"] == pytest.approx(2 * once["throughput/tflops_per_gpu"])
    forward = QWEN2_5_7B.flops(100) + QWEN2_5_7B.flops(50)
    assert once["throughput/tflops_per_gpu"] == pytest.approx(3 * forward / 2e12)
