"""Pools of slots, and the models that live there."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig, SftConfig
from megarl.config.load import make_config
from megarl.errors import ConfigError

BASE = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
PPO = {"type": "ppo", "kl_reward": None}


def run(**sections: Any) -> RunConfig:
    return make_config(RunConfig, BASE | sections)


def problem(kind: type[RunConfig] | type[SftConfig] = RunConfig, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_config(kind, BASE | sections)
    return str(error.value)


def test_all_live_with_the_trainer_by_default() -> None:
    config = run(algorithm={"type": "safe_rlhf"}, reward={"terms": {"a": {}, "cost": {"type": "model", "path": "cm"}}})
    assert [(role.name, role.key, role.path, role.head, role.pool) for role in config.roles] == [
        ("reference", "algorithm.reference", "m", "lm", "main"),
        ("critic", "algorithm.critic", "m", "value", "main"),
        ("cost_critic", "algorithm.cost_critic", "m", "value", "main"),
        ("reward cost", "reward.terms.cost", "cm", "value", "main"),
    ]
    assert [role.optimizer is None for role in config.roles] == [True, False, False, True]
    assert config.placement.all_slots == config.placement.slots == 1


def test_roles_of_other_algorithms() -> None:
    assert run(algorithm={"kl_loss": None}).roles == ()
    prime = run(algorithm={"type": "prime", "reward_model": {"path": "prm"}})
    assert [(role.name, role.place, role.path, role.head) for role in prime.roles] == [
        ("reference", "reference", "m", "lm"),
        ("reward_model", "reward_models", "prm", "lm"),
    ]
    (teacher,) = run(algorithm={"type": "distillation", "teacher": {"path": "t", "parallel": {}}}).roles
    assert (teacher.name, teacher.parallel_key, teacher.optimizer) == ("teacher", "algorithm.teacher.parallel", None)


def test_a_pool_of_its_own() -> None:
    config = run(
        algorithm=PPO | {"critic": {"parallel": {"tp": 2}}},
        placement={"slots_per_node": 3, "pools": {"b": {"nodes": 2, "slots_per_node": 2}}, "critic": {"pool": "b"}},
    )
    (critic,) = config.roles
    assert critic.pool == "b"
    assert (config.placement.slots, config.placement.all_slots) == (3, 7)
    assert config.placement.all_pools["b"].slots == 4


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"critic": {"pool": "b"}}, "placement: critic.pool needs one of ['main'], got 'b'"),
        (
            {"pools": {"b": {}, "c": {}}, "critic": {"pool": "d"}},
            "placement: critic.pool needs one of ['main', 'b', 'c'], got 'd'",
        ),
        (
            {"pools": {"b": {}}},
            "placement: pools.b: nothing lives there; give it to one of rollout, critic, cost_critic, reference, "
            "reward_models, teacher, or leave it out",
        ),
        (
            {"pools": {"main": {}}},
            "placement: pools.main: this is what nodes and slots_per_node describe, the slots of trainer and engines",
        ),
        (
            {"pools": {"b": {}}, "teacher": {"pool": "b"}},
            "RunConfig: placement.teacher.pool is 'b', and the run has no such model",
        ),
        (
            {"pools": {"b": {"slots_per_node": 3}}, "critic": {"pool": "b"}},
            "RunConfig: placement.pools.b needs a number of slots that algorithm.critic.parallel tp * pp * cp divides, "
            "got nodes * slots_per_node = 1 * 3 = 3, tp * pp * cp = 2 * 1 * 1 = 2, 3 % 2 = 1",
        ),
        (
            {"nodes": 2, "slots_per_node": 1},
            "RunConfig: algorithm.critic.parallel tp needs to divide the slots of a node, so that no tensor-parallel "
            "group crosses nodes, got placement slots_per_node % tp = 1 % 2 = 1",
        ),
        (
            {"nodes": 4, "slots_per_node": 1, "nvlink_domain_nodes": 3},
            "placement: nvlink_domain_nodes needs to divide nodes, got 4 % 3 = 1",
        ),
        (
            {"slots_per_node": 5},
            "RunConfig: placement needs a number of slots that algorithm.critic.parallel tp * pp * cp divides, got "
            "nodes * slots_per_node = 1 * 5 = 5, tp * pp * cp = 2 * 1 * 1 = 2, 5 % 2 = 1",
        ),
    ],
)
def test_places_that_there_are_not(placement: dict[str, Any], says: str) -> None:
    assert problem(algorithm=PPO | {"critic": {"parallel": {"tp": 2}}}, placement=placement) == says


def test_the_trainers_layout_has_to_fit_the_pool_too() -> None:
    assert problem(
        algorithm=PPO,
        trainer={"parallel": {"tp": 2}},
        placement={"slots_per_node": 2, "pools": {"b": {}}, "critic": {"pool": "b"}},
    ) == (
        "RunConfig: placement.pools.b needs a number of slots that trainer.parallel, for algorithm.critic, tp * pp * "
        "cp divides, got nodes * slots_per_node = 1 * 1 = 1, tp * pp * cp = 2 * 1 * 1 = 2, 1 % 2 = 1"
    )


def test_experts_have_to_fit_the_pool() -> None:
    says = problem(
        algorithm=PPO | {"critic": {"parallel": {"ep": 2}}}, placement={"pools": {"b": {}}, "critic": {"pool": "b"}}
    )
    assert "algorithm.critic.parallel etp * ep needs to divide the ranks of a pipeline stage" in says
    assert "slots / pp = 1 / 1 = 1, 1 % 2 = 1" in says


def test_fine_tuning_has_one_model() -> None:
    assert problem(SftConfig, placement={"pools": {"b": {}}, "critic": {"pool": "b"}}) == (
        "SftConfig: placement.critic.pool is 'b', and the run has no such model"
    )


def test_engines_in_a_pool_of_their_own() -> None:
    placement = {"pools": {"b": {"nodes": 2, "slots_per_node": 4}}, "rollout": {"pool": "b"}}
    config = run(rollout={"tp": 4, "replicas": 2}, placement=placement)
    assert (config.rollout_pool.slots, config.placement.slots, config.placement.all_slots) == (8, 1, 9)
    assert problem(rollout={"tp": 4, "replicas": 3}, placement=placement) == (
        "RunConfig: rollout needs tp * replicas <= slots, got 4 * 3 = 12 > 8 (placement.pools.b.nodes * "
        "placement.pools.b.slots_per_node)"
    )
    assert problem(rollout={"tp": 8}, placement=placement) == (
        "RunConfig: rollout.tp needs to fit one node, got rollout.tp = 8 > placement.pools.b.slots_per_node = 4"
    )
    assert problem(SftConfig, placement=placement) == (
        "SftConfig: placement.rollout.pool is 'b', and the stage has no engines"
    )


def test_engines_apart_receive_from_whichever_rank_holds_what_they_need() -> None:
    placement = {"pools": {"b": {}}, "rollout": {"pool": "b"}}
    assert not run().engines_apart
    assert run(placement=placement, weight_sync={"strategy": "exact"}).engines_apart
    for strategy in ("gather_hf", "micro_dp"):
        assert problem(placement=placement, weight_sync={"strategy": strategy}) == (
            f"RunConfig: weight_sync.strategy needs auto or exact where engines have slots of their own "
            f"(placement.rollout.pool is 'b'), got {strategy}"
        )


def test_engines_share_no_pool_but_the_trainers() -> None:
    placement = {"pools": {"b": {}}, "rollout": {"pool": "b"}, "critic": {"pool": "b"}}
    assert problem(algorithm=PPO, placement=placement) == (
        "RunConfig: placement.critic.pool is 'b', where the engines are; they share slots with the trainer's "
        "processes, or have their own"
    )


def test_tensor_groups_span_nodes_of_one_nvlink_domain_only() -> None:
    tp8 = {"parallel": {"tp": 8}}
    assert run(trainer=tp8, placement={"nodes": 4, "slots_per_node": 4, "nvlink_domain_nodes": 2}).dp == 2
    assert run(trainer={"parallel": {"tp": 3}}, placement={"slots_per_node": 3}).dp == 1
    assert problem(trainer=tp8, placement={"nodes": 6, "slots_per_node": 4, "nvlink_domain_nodes": 3}) == (
        "RunConfig: trainer.parallel tp needs to divide the slots of an NVLink domain, so that no tensor-parallel "
        "group crosses domains, got placement slots_per_node * nvlink_domain_nodes % tp = 4 * 3 % 8 = 4"
    )
