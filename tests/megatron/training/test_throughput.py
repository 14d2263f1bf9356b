"""Tokens, operations and MFU of a training step."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.batch.balance import QWEN2_5_7B, SequenceCost
from megarl.batch.sample_table import SampleRef
from megarl.functional.losses import Denominators
from megarl.megatron.request_split import split_by_dp
from megarl.megatron.requests import MiniBatch, TrainRequest
from megarl.megatron.training.throughput import Throughput
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import StoredPayload


def request(*lengths: tuple[int, ...], cost: SequenceCost = QWEN2_5_7B, epochs: int = 1) -> TrainRequest:
    """Return the request of one of two replicas."""
    count = Denominators(num_tokens=1, num_sequences=1)
    batches = tuple(
        MiniBatch(samples=tuple(SampleRef(payload=0, index=0, num_tokens=n) for n in of), denominators=count)
        for of in lengths
    )
    payload: Any = StoredPayload("ref")
    work = TrainRequest(mini_batches=batches, payloads=(payload,), max_tokens_per_micro_batch=8, epochs=epochs)
    return split_by_dp(work, RankGrid(dp=2), cost=cost)[0]


def test_six_operations_per_token_and_parameter_where_attention_is_negligible() -> None:
    cost = SequenceCost(matmul_parameters=7_000_000_000, attention_layers=1, attention_width=1)
    throughput = Throughput(num_gpus=8, peak_flops=989e12)
    metrics = throughput.metrics(request((1000, 3000), (4000,), cost=cost), seconds=0.5)
    assert metrics["throughput/tokens_per_second_per_gpu"] == 8000 / 0.5 / 8
    assert metrics["throughput/tflops_per_gpu"] == pytest.approx(6 * 7e9 * 8000 / 0.5 / 8 / 1e12, rel=1e-5)
    assert metrics["throughput/mfu"] == pytest.approx(metrics["throughput/tflops_per_gpu"] / 989)


def test_every_epoch_counts_operations_and_an_unknown_gpu_has_no_mfu() -> None:
    throughput = Throughput(num_gpus=1, peak_flops=None)
    once, twice = (throughput.metrics(request((100, 50), epochs=n), seconds=2.0) for n in (1, 2))
    assert once.keys() == twice.keys() == {"throughput/tokens_per_second_per_gpu", "throughput/tflops_per_gpu"}
    assert twice["throughput/tflops_per_gpu"] == pytest.approx(2 * once["throughput/tflops_per_gpu"])
    forward = QWEN2_5_7B.flops(100) + QWEN2_5_7B.flops(50)
    assert once["throughput/tflops_per_gpu"] == pytest.approx(3 * forward / 2e12)
