"""Weight sync with parallel sizes that do not divide: engines are placed by traced layouts and receive boxes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megarl.config import RunConfig
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.reshard.layout.engine_ranks import can_place_strided
from megarl.reshard.layout.layout import slices
from megarl.run.remote.engine_group import pool_topology
from megarl.run.sync.weight_sync import PushReport
from tests.end_to_end.components import Components, started
from tests.end_to_end.tiny_world import SIZES, run_tree
from tests.engines.remote import digest, piece_hashes


@dataclass(frozen=True)
class Case:
    tp: int
    slots: int
    strategy: str
    heads: int
    servers: tuple[int, ...]
    moves_nothing: bool


CASES = {
    "1-1-2 -> 1-2": Case(1, 2, "exact", heads=4, servers=(0, 1), moves_nothing=True),
    "1-3-1 -> 1-2": Case(3, 3, "auto", heads=12, servers=(0, 2), moves_nothing=False),
}


def make_config(case: Case, world: Path, folder: Path) -> RunConfig:
    heads = {"hidden_size": 48, "num_heads": case.heads, "num_kv_heads": case.heads // 2, "head_dim": 8}
    texts = (world / "data" / "train.jsonl").read_text().splitlines()
    write_tiny_model(folder / "model", texts, seed=0, **SIZES | heads)
    sections: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "trainer": {"steps": 2, "optimizer": {"lr": 1e-3}, "parallel": {"tp": case.tp}},
        "rollout": {"tp": 2, "max_new_tokens": 12},
        "weight_sync": {
            "strategy": case.strategy,
            "bucket_bytes": 60_000,
            "verify": {"every": 2},
            "delta": True,
        },
        "placement": {"slots_per_node": case.slots},
    }
    return RunConfig.model_validate(run_tree(world, folder / "run", **sections))


def push(components: Components, exported: Mapping[str, Tensor], version: int) -> PushReport:
    """Push all weights, and later those that a step has changed."""
    if version == 0:
        components.overwrite_served(exported)
    report = components.weights.push(version)
    assert report.metrics()["weight_sync/is_full"] == float(version == 0)
    return report


def check_served(components: Components, exported: Mapping[str, Tensor]) -> None:
    (layouts,) = components.engines.call("layouts")
    by_rank = piece_hashes(components.engines, layouts)
    assert len(by_rank) == 2
    for hashes in by_rank:
        assert hashes == {key: digest(exported[key[0]][slices(key[1])]) for key in hashes}
    assert {tensor for hashes in by_rank for tensor, _ in hashes} == exported.keys()


def check_that_unchanged_weights_stay(components: Components, whole: PushReport, exported: dict[str, Tensor]) -> None:
    """Push weights again that the engines hold."""
    again = components.weights.push(3)
    assert again.bytes_moved == again.stats.count_bytes
    assert (again.bytes_saved, again.stats.changed_elements) == (whole.bytes_moved, 0)
    check_served(components, exported)


@pytest.mark.parametrize("name", ["1-3-1 -> 1-2", pytest.param("1-1-2 -> 1-2", marks=pytest.mark.slow)])
def test_engine_weights_equal_trainer_weights_bitwise_over_two_steps(name, cluster, world, tmp_path):
    case = CASES[name]
    with started(make_config(case, world, tmp_path)) as components:
        assert not can_place_strided(components.trainer.grid, pool_topology(components.pool), gen_tp=2)
        assert [tuple(ranks) for ranks in components.engines.engine_slots] == [case.servers]
        reports: list[PushReport] = []
        for version in (0, 1, 2):
            exported = components.exported(tmp_path / f"exported-{version}")
            reports.append(report := push(components, exported, version))
            stats = report.stats
            assert ("verify" in report.seconds) == (version % 2 == 0)
            check_served(components, exported)
            assert (stats.bytes_received == 0) == case.moves_nothing
            assert stats.bytes_received < stats.bytes_delivered
            groups = components.sample(f"version-{version}")
            if version < 2:
                assert 0 < components.train(groups).metrics["train_infer_mismatch/logprob_abs_max"] <= 1e-4
        check_that_unchanged_weights_stay(components, reports[0], exported)
        first, last = (load_file(tmp_path / f"exported-{n}" / "model.safetensors") for n in (0, 2))
        assert not any(digest(first[tensor]) == digest(last[tensor]) for tensor in first)
