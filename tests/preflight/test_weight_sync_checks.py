"""The weight sync of a configuration is simulated under NCCL's rules before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config import RunConfig
from megarl.placement.nodes import planned_nodes
from megarl.preflight import weight_sync_checks
from megarl.preflight.run_checks import check_run
from megarl.reshard.analysis import nccl_progress
from megarl.reshard.analysis.nccl_progress import PostedGroup
from megarl.reshard.planning.rounds import Round
from tests.cli.tiny_run import write_config, write_tiny_run

COLOCATED: dict[str, Any] = {
    "placement": {"slots_per_node": 4, "nodes": 2, "device": "cuda"},
    "trainer": {"parallel": {"tp": 4}},
}
DEDICATED = COLOCATED | {
    "placement": {
        "slots_per_node": 4,
        "device": "cuda",
        "rollout": {"pool": "engines"},
        "pools": {"engines": {"nodes": 2, "slots_per_node": 4}},
    }
}
OVER_NODES = DEDICATED | {
    "placement": DEDICATED["placement"] | {"pools": {"engines": {"nodes": 4, "slots_per_node": 2}}}
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro_dp": (COLOCATED, {"tp": 2, "replicas": 4}),
    "fewer engines than fit": (COLOCATED, {"tp": 2, "replicas": 1}),
    "exact": (COLOCATED | {"weight_sync": {"strategy": "exact"}}, {"tp": 4, "replicas": 2}),
    "exact, tp grows": (COLOCATED | {"trainer": {"parallel": {"tp": 1}}}, {"tp": 4, "replicas": 2}),
    "dedicated engines": (DEDICATED, {"tp": 2, "replicas": 4}),
    "engines over two nodes": (OVER_NODES, {"tp": 4, "replicas": 2}),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tree = write_tiny_run(tmp_path_factory.mktemp("weight_sync"))
    return tree | {"algorithm": {"prompts_per_step": 8}}


def make_config(tree: dict[str, Any], layout: str) -> RunConfig:
    sections, engine = LAYOUTS[layout]
    return RunConfig.model_validate(tree | sections | {"rollout": tree["rollout"] | engine})


def problems_of(config: RunConfig) -> list[str]:
    return check_run(config, planned_nodes([5], gpus=[4], cpus=[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_progress(tree: dict[str, Any], layout: str) -> None:
    assert problems_of(make_config(tree, layout)) == []


@pytest.mark.parametrize("layout", ["micro_dp", "dedicated engines"])
def test_a_plan_that_would_hang_is_refused(tree: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank posts its groups in an order of its own."""
    groups_of, count = nccl_progress.posted_groups, iter(range(1000))

    def posted_groups(rounds: Sequence[Round], members: Sequence[int] = ()) -> list[PostedGroup]:
        parts = [
            part
            for group in groups_of(rounds, members)
            for part in (
                PostedGroup(receives=group.receives, step=group.step),
                PostedGroup(sends=group.sends, step=group.step),
                PostedGroup(all_gathers=group.all_gathers, communicator=group.communicator, step=group.step),
            )
            if part.receives or part.sends or part.all_gathers
        ]
        return parts[:: 1 if next(count) % 2 else -1]

    monkeypatch.setattr(nccl_progress, "posted_groups", posted_groups)
    (problem,) = problems_of(make_config(tree, layout))
    assert problem.startswith("weight_sync: the first sync would hang over NCCL: rank ")
    assert "of round " in problem


def test_the_check_is_for_nccl_only(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tree, "micro_dp")
    monkeypatch.setattr(nccl_progress, "posted_groups", None)
    with pytest.raises(TypeError):
        list(weight_sync_checks.find_stall_problems(config, "cuda"))
    assert list(weight_sync_checks.find_stall_problems(config, "cpu")) == []


@pytest.mark.parametrize(
    ("sections", "limit", "notice"),
    [
        ({}, 20_000, None),
        ({"weight_sync": {"strategy": "gather_hf"}}, 20_000, "gather_hf calls its collectives in the same order"),
        ({}, 100, "planning 25 tensors for 8 ranks takes too long here; `megarl reshard explain` simulates it"),
    ],
)
def test_a_plan_that_is_not_simulated_is_named(
    tree: dict[str, Any],
    sections: dict[str, Any],
    limit: int,
    notice: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(weight_sync_checks, "MAX_TENSORS", limit)
    layout, engine = LAYOUTS["micro_dp"]
    recipe = write_config(tmp_path / "run.yaml", tree | layout | sections | {"rollout": tree["rollout"] | engine})
    assert main(["check", str(recipe), "--nodes", "2", "--gpus-per-node", "4"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# weight_sync")]
    if notice is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("# weight_sync: not simulated under NCCL's rules: " + notice)


def test_delta_needs_engines_that_keep_their_weights(tree: dict[str, Any]) -> None:
    delta = tree | COLOCATED | {"weight_sync": {"delta": True}}
    refused = RunConfig.model_validate(delta | {"rollout": tree["rollout"] | {"tp": 2, "replicas": 4}})
    (problem,) = problems_of(refused)
    assert problem.startswith("weight_sync.delta needs engines that keep their weights while the trainer works: set ")
    dedicated = RunConfig.model_validate(
        tree | DEDICATED | {"weight_sync": {"delta": True}, "rollout": tree["rollout"] | {"tp": 2, "replicas": 4}}
    )
    for config, device in ((refused, "cpu"), (dedicated, "cuda"), (dedicated, None)):
        assert list(weight_sync_checks.find_delta_problems(config, device)) == []
    released = tree["rollout"] | {"engine": {"type": "sglang", "release_memory": True}}
    with pytest.raises(ValueError, match=r"weight_sync\.delta needs engines that keep .*release_memory: true"):
        RunConfig.model_validate(delta | {"rollout": released})
    with pytest.raises(ValueError, match=r"weight_sync\.delta needs weight_sync\.strategy to be auto, micro_dp or exa"):
        RunConfig.model_validate(tree | {"weight_sync": {"delta": True, "strategy": "gather_hf"}})
