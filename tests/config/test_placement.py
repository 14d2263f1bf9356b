"""Pools of slots, and the pools of engines and auxiliary models."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig, SftConfig
from megarl.config.load import make_config
from megarl.errors import ConfigError

BASE = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
PPO = {"type": "ppo", "kl_reward": None}


def make_run(**sections: Any) -> RunConfig:
    return make_config(RunConfig, BASE | sections)


def error_message(kind: type[RunConfig] | type[SftConfig] = RunConfig, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_config(kind, BASE | sections)
    return str(error.value)


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
        (
            {"pools": {"b": {}}},
            "placement: pools.b: the pool is not used; assign one of rollout, critic, cost_critic, reference, "
            "reward_models, teacher to it, or remove it",
        ),
        (
            {"pools": {"main": {}}},
            "placement: pools.main: this name is reserved for the trainer's pool, which placement.nodes and "
            "placement.slots_per_node describe",
        ),
        (
            {"pools": {"b": {}}, "teacher": {"pool": "b"}},
            "RunConfig: placement.teacher.pool is 'b', but the run has no such model",
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
def test_invalid_pools_are_rejected(placement: dict[str, Any], message: str) -> None:
    assert error_message(algorithm=PPO | {"critic": {"parallel": {"tp": 2}}}, placement=placement) == message


def test_the_default_parallel_sizes_need_to_fit_the_pool() -> None:
    assert error_message(
        algorithm=PPO,
        trainer={"parallel": {"tp": 2}},
        placement={"slots_per_node": 2, "pools": {"b": {}}, "critic": {"pool": "b"}},
    ) == (
        "RunConfig: placement.pools.b needs a number of slots that trainer.parallel, for algorithm.critic, tp * pp * "
        "cp divides, got nodes * slots_per_node = 1 * 1 = 1, tp * pp * cp = 2 * 1 * 1 = 2, 1 % 2 = 1"
    )


def test_expert_sizes_need_to_fit_the_pool() -> None:
    message = error_message(
        algorithm=PPO | {"critic": {"parallel": {"ep": 2}}}, placement={"pools": {"b": {}}, "critic": {"pool": "b"}}
    )
    assert "algorithm.critic.parallel etp * ep needs to divide the ranks of a pipeline stage" in message
    assert "slots / pp = 1 / 1 = 1, 1 % 2 = 1" in message


def test_sft_has_no_auxiliary_models() -> None:
    assert error_message(SftConfig, placement={"pools": {"b": {}}, "critic": {"pool": "b"}}) == (
        "SftConfig: placement.critic.pool is 'b', but the run has no such model"
    )


def test_engines_in_their_own_pool() -> None:
    placement = {"pools": {"b": {"nodes": 2, "slots_per_node": 4}}, "rollout": {"pool": "b"}}
    config = make_run(rollout={"tp": 4, "replicas": 2}, placement=placement)
    assert (config.rollout_pool.slots, config.placement.slots, config.placement.total_slots) == (8, 1, 9)
    assert error_message(rollout={"tp": 4, "replicas": 3}, placement=placement) == (
        "RunConfig: rollout needs tp * replicas <= slots, got 4 * 3 = 12 > 8 (placement.pools.b.nodes * "
        "placement.pools.b.slots_per_node)"
    )
    assert config.nodes_per_engine == 1
    assert error_message(SftConfig, placement=placement) == (
        "SftConfig: placement.rollout.pool is 'b', but the stage has no engines"
    )


def test_engines_with_more_ranks_than_slots_on_a_node_span_nodes() -> None:
    placement = {"pools": {"b": {"nodes": 5, "slots_per_node": 4}}, "rollout": {"pool": "b"}}
    for tp, nodes in ((2, 1), (4, 1), (8, 2), (20, 5)):
        assert make_run(rollout={"tp": tp}, placement=placement).nodes_per_engine == nodes
    assert make_run(rollout={"tp": 8, "replicas": 2}, placement=placement).nodes_per_engine == 2
    assert error_message(rollout={"tp": 6}, placement=placement) == (
        "RunConfig: rollout.tp needs to fit on one node or to fill several, got "
        "rollout.tp % placement.pools.b.slots_per_node = 6 % 4 = 2"
    )
    assert error_message(rollout={"tp": 8}, placement={"nodes": 2, "slots_per_node": 4}) == (
        "RunConfig: rollout.tp needs to fit on one node, got rollout.tp = 8 > placement.slots_per_node = 4; only "
        "engines with a pool of their own (placement.rollout.pool) may span nodes"
    )


def test_disaggregated_engines_need_strategy_exact() -> None:
    placement = {"pools": {"b": {}}, "rollout": {"pool": "b"}}
    assert not make_run().disaggregated
    assert make_run(placement=placement, weight_sync={"strategy": "exact"}).disaggregated
    for strategy in ("gather_hf", "micro_dp"):
        assert error_message(placement=placement, weight_sync={"strategy": strategy}) == (
            f"RunConfig: weight_sync.strategy needs to be auto or exact where engines have their own pool "
            f"(placement.rollout.pool is 'b'), got {strategy}"
        )


def test_engines_share_only_the_main_pool() -> None:
    placement = {"pools": {"b": {}}, "rollout": {"pool": "b"}, "critic": {"pool": "b"}}
    assert error_message(algorithm=PPO, placement=placement) == (
        "RunConfig: placement.critic.pool is 'b', the pool of the engines; engines can share only the pool 'main'"
    )


def test_tensor_parallel_groups_stay_within_one_nvlink_domain() -> None:
    tp8 = {"parallel": {"tp": 8}}
    assert make_run(trainer=tp8, placement={"nodes": 4, "slots_per_node": 4, "nvlink_domain_nodes": 2}).dp == 2
    assert make_run(trainer={"parallel": {"tp": 3}}, placement={"slots_per_node": 3}).dp == 1
    assert error_message(trainer=tp8, placement={"nodes": 6, "slots_per_node": 4, "nvlink_domain_nodes": 3}) == (
        "RunConfig: trainer.parallel tp needs to divide the slots of an NVLink domain, so that no tensor-parallel "
        "group crosses domains, got placement slots_per_node * nvlink_domain_nodes % tp = 4 * 3 % 8 = 4"
    )
