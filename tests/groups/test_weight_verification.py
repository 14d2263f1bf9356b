"""Which versions are compared, and what the error says, with fake trainers and engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import WeightSyncError
from megarl.groups import sync_update
from megarl.groups.weight_verification import verify_weights
from megarl.reshard.layout.sampled_boxes import SampledBox
from megarl.reshard.transfer.sample_digests import ExpectedBox
from tests.groups.scripted_cluster import make

__all__ = ["make"]

SAMPLES = [SampledBox(1, "w", ((0, 2),), "float32"), SampledBox(0, "v", ((3, 4),), "float32")]
PART, DIGEST = ((0, 1),), b"digest of one part"


class Trainer:
    """Two ranks; the second holds a part of the first sample."""

    def digest_samples(self, samples: list[SampledBox]) -> Any:
        assert samples == SAMPLES
        return [[{((1, 2),): b"1"}, {((3, 4),): b"v"}], [{PART: DIGEST}, {}]]


class Engines:
    """Two engines, of which the second may differ."""

    def __init__(self, problem: str | None = None, other_samples: list[SampledBox] | None = None) -> None:
        self.engines = [SimpleNamespace(name="engine 0"), SimpleNamespace(name="engine 1")]
        self._problem, self._samples = problem, [SAMPLES, other_samples or SAMPLES]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "sample_boxes":
            assert arguments == (8, 16)
            return self._samples
        assert method == "verify_weights"
        ((*expected,),) = arguments
        assert ExpectedBox(1, "w", PART, DIGEST) in expected
        assert len(expected) == 3
        return [None, self._problem]


def verify(engines: Engines) -> None:
    verify_weights(Trainer(), engines, 8, 16)  # type: ignore[arg-type]


def test_engines_compare_what_all_trainer_ranks_hold_and_errors_name_the_engine() -> None:
    verify(Engines())
    with pytest.raises(WeightSyncError, match=r"^version 8: engine 1: TP rank 1 does not hold w$"):
        verify(Engines("TP rank 1 does not hold w"))
    with pytest.raises(WeightSyncError, match="engine 1 has another weight layout than engine 0"):
        verify(Engines(other_samples=SAMPLES[:1]))


def test_every_second_version_is_compared_before_it_is_served(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, sync = make(verify={"every": 2, "sample": 5})
    compared: list[int] = []

    def compare(trainer: Any, engines: Any, policy_version: int, sample: int) -> None:
        assert (trainer, len(engines.engines), sample) == (cluster, 2, 5)
        assert ("serves", 0, policy_version) not in cluster.calls
        compared.append(policy_version)
        if policy_version == 4:
            raise WeightSyncError("engine 0: TP rank 0 does not hold w")

    monkeypatch.setattr(sync_update, "verify_weights", compare)
    phases = [set(sync.push(version).seconds) for version in range(4)]
    assert compared == [0, 2]
    assert phases == [{"open", "transfer", "verify", "commit"}, {"open", "transfer", "commit"}] * 2
    with pytest.raises(WeightSyncError, match="does not hold w"):
        sync.push(4)
    assert [call for call in cluster.calls if call[0] == "aborts"]
    assert ("serves", 0, 4) not in cluster.calls
    assert sync.policy_version == 3
