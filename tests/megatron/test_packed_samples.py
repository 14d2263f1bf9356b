"""Packed samples equal those that a rank fetches by itself."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from megarl.batch.sample_table import SampleKey, SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.functional.losses import Denominators
from megarl.megatron.packed_samples import pack_samples
from megarl.megatron.requests import ForwardRequest, MiniBatch, TrainRequest
from megarl.megatron.training.samples import StepSamples, payloads_by_index
from megarl.workers.payload import LocalPayload

RNG = np.random.default_rng(0)


def make_trajectory(number: int, index: int) -> Trajectory:
    n = int(RNG.integers(2, 9))
    mask = np.arange(n) >= 1
    return Trajectory(
        prompt_id=f"d.jsonl:{number}",
        group_id=number,
        token_ids=RNG.integers(0, 99, n).astype(np.int32),
        loss_mask=mask,
        logprobs=RNG.normal(size=n).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        rewards={"match": 1.0 * index},
        reward=1.0 * index,
        reward_errors={"match": "no answer"} if index == 2 else {},
        finish_reason="length" if index == 1 else "stop",
    )


GROUPS = [[make_trajectory(number, index) for index in range(4)] for number in range(5)]
KEYS: list[SampleKey] = [(3, 1), (0, 2), (3, 0), (4, 3), (0, 2)]
"""One of them twice, as in a request with repeated samples."""


def samples_of(keys: list[SampleKey]) -> tuple[SampleRef, ...]:
    return tuple(SampleRef(payload=p, index=i, num_tokens=GROUPS[p][i].num_tokens) for p, i in keys)


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return {k: (v.dtype, v.tolist()) if isinstance(v, np.ndarray) else v for k, v in values.items()}


def make_request() -> TrainRequest:
    column = [{(p, i): RNG.normal(size=GROUPS[p][i].num_tokens).astype(np.float32) for i in range(4)} for p in range(5)]
    batches = [
        MiniBatch(samples=samples_of(keys), denominators=Denominators(num_tokens=9, num_sequences=len(keys)))
        for keys in (KEYS[:2], KEYS[2:])
    ]
    payloads: Mapping[int, Any] = {number: LocalPayload(GROUPS[number]) for number in (0, 3, 4)}
    return TrainRequest(
        mini_batches=tuple(batches),
        payloads=payloads,
        max_tokens_per_micro_batch=9,
        columns={"values": LocalPayload(column)},
    )


def test_samples_and_columns_of_a_training_request_are_unchanged() -> None:
    request = make_request()
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
    request = ForwardRequest(samples=samples_of(KEYS), payloads=payloads, max_tokens_per_micro_batch=9)
    packed = pack_samples(request)
    found = payloads_by_index(packed)
    for number, index in KEYS:
        assert values_of(found[number].fetch()[index]) == values_of(GROUPS[number][index])
    assert list(found) == [0, 3, 4]


def test_a_replica_without_samples_has_nothing_to_pack() -> None:
    request = ForwardRequest(samples=(), payloads={}, max_tokens_per_micro_batch=9)
    assert pack_samples(request) is request
