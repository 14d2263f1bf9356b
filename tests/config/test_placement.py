"""Pools of slots, and the pools of engines and auxiliary models."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import SftConfig
from tests.config.runs import error_message, has_parts, make_run

PPO = {"type": "ppo", "kl_reward": None}


def test_all_models_are_in_the_main_pool_by_default() -> None:
    config = make_run(
        algorithm={"type": "safe_rlhf"}, reward={"terms": {"a": {}, "cost": {"type": "model", "path": "cm"}}}
    )
    assert [
        (auxiliary.name, auxiliary.key, auxiliary.path, auxiliary.head, auxiliary.pool)
        for auxiliary in config.auxiliary_models
    ] == [
        ("reference", "algorithm.reference", "m", "lm", "main"),
        ("critic", "algorithm.critic", "m", "value", "main"),
        ("cost_critic", "algorithm.cost_critic", "m", "value", "main"),
        ("reward cost", "reward.terms.cost", "cm", "value", "main"),
    ]
    assert [auxiliary.optimizer is None for auxiliary in config.auxiliary_models] == [True, False, False, True]
    assert config.placement.total_slots == config.placement.slots == 1


def test_auxiliary_models_of_other_algorithms() -> None:
    assert make_run(algorithm={"kl_loss": None}).auxiliary_models == ()
    prime = make_run(algorithm={"type": "prime", "reward_model": {"path": "prm"}})
    assert [
        (auxiliary.name, auxiliary.role, auxiliary.path, auxiliary.head) for auxiliary in prime.auxiliary_models
    ] == [
        ("reference", "reference", "m", "lm"),
        ("reward_model", "reward_models", "prm", "lm"),
    ]
    (teacher,) = make_run(algorithm={"type": "distillation", "teacher": {"path": "t", "parallel": {}}}).auxiliary_models
    assert (teacher.name, teacher.parallel_key, teacher.optimizer) == ("teacher", "algorithm.teacher.parallel", None)


def test_critic_in_its_own_pool() -> None:
    config = make_run(
        algorithm=PPO | {"critic": {"parallel": {"tp": 2}}},
        placement={"slots_per_node": 3, "pools": {"b": {"nodes": 2, "slots_per_node": 2}}, "critic": {"pool": "b"}},
    )
    (critic,) = config.auxiliary_models
    assert critic.pool == "b"
    assert (config.placement.slots, config.placement.total_slots) == (3, 7)
    assert config.placement.all_pools["b"].slots == 4


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"critic": {"pool": "b"}}, "placement: critic.pool needs one of ['main'], got 'b'"),
        (
            {"pools": {"b": {}, "c": {}}, "critic": {"pool": "d"}},
            "placement: critic.pool needs one of ['main', 'b', 'c'], got 'd'",
        ),
        ({"pools": {"b": {}}}, "placement: pools.b: the pool is not used; assign one of rollout, critic, ... to it"),
        ({"pools": {"main": {}}}, "placement: pools.main: this name is reserved ... placement.slots_per_node"),
        (
            {"pools": {"b": {}}, "teacher": {"pool": "b"}},
            "RunConfig: placement.teacher.pool is 'b', but the run has no such model",
        ),
        (
            {"pools": {"b": {"slots_per_node": 3}}, "critic": {"pool": "b"}},
            "RunConfig: placement.pools.b ... algorithm.critic.parallel tp * pp * cp ... "
            "= 1 * 3 = 3, ... = 2 * 1 * 1 = 2, 3 % 2 = 1",
        ),
        (
            {"nodes": 2, "slots_per_node": 1},
            "RunConfig: algorithm.critic.parallel tp ... a node ... placement slots_per_node % tp = 1 % 2 = 1",
        ),
        (
            {"nodes": 4, "slots_per_node": 1, "nvlink_domain_nodes": 3},
            "placement: nvlink_domain_nodes needs to divide nodes, got 4 % 3 = 1",
        ),
        (
            {"slots_per_node": 5},
            "RunConfig: placement ... algorithm.critic.parallel tp * pp * cp ... = 1 * 5 = 5, ... 5 % 2 = 1",
        ),
    ],
)
def test_invalid_pools_are_rejected(placement: dict[str, Any], message: str) -> None:
    found = error_message(algorithm=PPO | {"critic": {"parallel": {"tp": 2}}}, placement=placement)
    assert has_parts(found, message)


def test_the_default_parallel_sizes_need_to_fit_the_pool() -> None:
    placement = {"slots_per_node": 2, "pools": {"b": {}}, "critic": {"pool": "b"}}
    message = error_message(algorithm=PPO, trainer={"parallel": {"tp": 2}}, placement=placement)
    assert has_parts(message, "RunConfig: placement.pools.b ... trainer.parallel, for algorithm.critic, ... 1 % 2 = 1")


POOL_B = {"pools": {"b": {}}}
LARGE_POOL = {"pools": {"b": {"nodes": 5, "slots_per_node": 4}}, "rollout": {"pool": "b"}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {
                "algorithm": PPO | {"critic": {"parallel": {"ep": 2}}},
                "placement": POOL_B | {"critic": {"pool": "b"}},
            },
            "... algorithm.critic.parallel etp * ep needs to divide ... slots / pp = 1 / 1 = 1, 1 % 2 = 1",
        ),
        (
            {"rollout": {"tp": 4, "replicas": 6}, "placement": LARGE_POOL},
            "RunConfig: rollout needs tp * replicas <= slots, got 4 * 6 = 24 > 20 (placement.pools.b.nodes *",
        ),
        (
            {"rollout": {"tp": 6}, "placement": LARGE_POOL},
            "RunConfig: rollout.tp needs to fit on one node or to fill several, got ... = 6 % 4 = 2",
        ),
        (
            {"rollout": {"tp": 8}, "placement": {"nodes": 2, "slots_per_node": 4}},
            "RunConfig: rollout.tp needs to fit on one node, got rollout.tp = 8 > placement.slots_per_node = 4; only",
        ),
        (
            {"algorithm": PPO, "placement": POOL_B | {"rollout": {"pool": "b"}, "critic": {"pool": "b"}}},
            "RunConfig: placement.critic.pool is 'b', the pool of the engines; engines can share only the pool 'main'",
        ),
        (
            {
                "trainer": {"parallel": {"tp": 8}},
                "placement": {"nodes": 6, "slots_per_node": 4, "nvlink_domain_nodes": 3},
            },
            "RunConfig: trainer.parallel tp needs to divide the slots of an NVLink domain, ... = 4 * 3 % 8 = 4",
        ),
        *(
            (
                {"placement": POOL_B | {"rollout": {"pool": "b"}}, "weight_sync": {"strategy": strategy}},
                f"RunConfig: weight_sync.strategy needs to be auto or exact ... pool is 'b'), got {strategy}",
            )
            for strategy in ("gather_hf", "micro_dp")
        ),
    ],
)
def test_models_and_engines_need_to_fit_their_pools(sections: dict[str, Any], message: str) -> None:
    assert has_parts(error_message(**sections), message)


def test_sft_has_neither_auxiliary_models_nor_engines() -> None:
    for name, lacks in (("critic", "the run has no such model"), ("rollout", "the stage has no engines")):
        assert error_message(SftConfig, placement=POOL_B | {name: {"pool": "b"}}) == (
            f"SftConfig: placement.{name}.pool is 'b', but {lacks}"
        )


def test_engines_in_their_own_pool() -> None:
    config = make_run(rollout={"tp": 4, "replicas": 5}, placement=LARGE_POOL)
    assert (config.rollout_pool.slots, config.placement.slots, config.placement.total_slots) == (20, 1, 21)
    for tp, replicas, nodes in ((2, 1, 1), (4, 1, 1), (8, 1, 2), (20, 1, 5), (8, 2, 2)):
        rollout = {"tp": tp, "replicas": replicas}
        assert make_run(rollout=rollout, placement=LARGE_POOL).nodes_per_engine == nodes
    assert not make_run().disaggregated
    assert make_run(placement=LARGE_POOL, weight_sync={"strategy": "exact"}).disaggregated


def test_tensor_parallel_groups_stay_within_one_nvlink_domain() -> None:
    domains = {"nodes": 4, "slots_per_node": 4, "nvlink_domain_nodes": 2}
    assert make_run(trainer={"parallel": {"tp": 8}}, placement=domains).dp == 2
    assert make_run(trainer={"parallel": {"tp": 3}}, placement={"slots_per_node": 3}).dp == 1
