"""Assignment of nodes to pools: chosen examples, and random clusters compared with all possible assignments."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.placement.assign import DOMAIN_LABEL, ClusterNode, assign_nodes
from megarl.config.placement import PoolConfig
from megarl.errors import ConfigError


def node(name, gpus=8, **labels):
    dotted = {key.replace("_", "."): value for key, value in labels.items() if key != "domain"}
    domain = {DOMAIN_LABEL: labels["domain"]} if "domain" in labels else {}
    return ClusterNode(id=name, address="10.0.0.1", hostname=name, cpus=4, gpus=gpus, labels=dotted | domain)


def pool(nodes=1, slots_per_node=1, **more):
    return PoolConfig.model_validate({"nodes": nodes, "slots_per_node": slots_per_node, **more})


def assigned_names(pools, nodes, device="cuda"):
    chosen = assign_nodes(pools, nodes, device)
    assert list(chosen) == list(pools)
    return {name: "".join(each.id for each in of_pool) for name, of_pool in chosen.items()}


def test_ranks_fill_nodes_in_order():
    assert assigned_names({"main": pool(3, 8)}, [node(x) for x in "abcd"]) == {"main": "abc"}
    assert assigned_names({"main": pool(2, 4), "b": pool(2, 4)}, [node("a"), node("b")]) == {"main": "ab", "b": "ab"}


def test_pools_do_not_take_nodes_that_others_need():
    small_first = [node("a", 4), node("b", 8)]
    assert assigned_names({"main": pool(1, 4), "b": pool(1, 8)}, small_first) == {"main": "a", "b": "b"}
    assert assigned_names({"main": pool(1, 4), "b": pool(1, 8)}, small_first[::-1]) == {"main": "a", "b": "b"}
    head = ClusterNode(id="h", address="", hostname="h", cpus=64, gpus=0)
    assert assigned_names({"main": pool(1, 4)}, [head, *small_first]) == {"main": "a"}
    assert assigned_names({"main": pool(1, 4)}, [head, *small_first], "cpu") == {"main": "a"}


def test_pools_choose_nodes_by_their_labels():
    nodes = [node("a", megarl_group="1"), node("b"), node("c", megarl_group="1")]
    pools = {"main": pool(1, 8), "rollout": pool(2, 8, labels={"megarl.group": "1"})}
    assert assigned_names(pools, nodes) == {"main": "b", "rollout": "ac"}


def test_blocks_of_nodes_share_an_nvlink_domain():
    nodes = [node(name, domain=domain) for name, domain in zip("abcdef", "xyxyyx", strict=True)]
    assert assigned_names({"main": pool(4, 8, nvlink_domain_nodes=2)}, nodes) == {"main": "acbd"}
    assert assigned_names({"main": pool(3, 8, nvlink_domain_nodes=3)}, nodes) == {"main": "acf"}
    assert assigned_names({"main": pool(3, 8)}, nodes) == {"main": "acb"}
    with pytest.raises(ConfigError) as error:
        assign_nodes({"main": pool(4, 8, nvlink_domain_nodes=4)}, nodes, "cuda")
    assert str(error.value) == (
        "placement: needs nodes * slots_per_node = 4 * 8 = 32 GPUs on 4 nodes, in blocks of nvlink_domain_nodes = 4 "
        "within one NVLink domain; the cluster has 6 nodes with 8 GPUs or more (a:8 b:8 c:8 d:8 e:8 f:8)"
    )


def test_too_few_nodes_are_reported_with_the_arithmetic():
    with pytest.raises(ConfigError) as error:
        assign_nodes({"main": pool(2, 8), "b": pool(1, 4)}, [node("x"), node("y"), node("z", 2)], "cuda")
    assert str(error.value) == (
        "placement.pools.b: needs nodes * slots_per_node = 1 * 4 = 4 GPUs on 1 node, in addition to placement; the "
        "cluster has 2 nodes with 4 GPUs or more (x:8 y:8 z:2)"
    )
    with pytest.raises(ConfigError) as error:
        assign_nodes({"main": pool(2, 1, labels={"zone": "a"})}, [node("x")], "cpu")
    assert str(error.value) == (
        "placement: needs nodes * slots_per_node = 2 * 1 = 2 CPU slots on 2 nodes, labeled zone=a; the cluster has 0 "
        "nodes with 1 CPU slots or more (none)"
    )


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=3),
)
def test_pools_fit_whenever_any_assignment_fits(sizes, requested):
    nodes = [node(str(i), gpus) for i, gpus in enumerate(sizes)]
    pools = {f"p{i}": pool(*sizes) for i, sizes in enumerate(requested)}
    try:
        chosen = assign_nodes(pools, nodes, "cuda")
    except ConfigError:
        assert not _has_valid_assignment(sizes, requested)
        return
    left = dict(zip((each.id for each in nodes), sizes, strict=True))
    for name, of_pool in chosen.items():
        assert len({each.id for each in of_pool}) == pools[name].nodes
        for each in of_pool:
            left[each.id] -= pools[name].slots_per_node
    assert min(left.values()) >= 0


def _has_valid_assignment(sizes, requested):
    for choice in product(*(list(combinations(range(len(sizes)), count)) for count, _ in requested)):
        used = [0] * len(sizes)
        for chosen_nodes, (_, per_node) in zip(choice, requested, strict=True):
            for chosen_node in chosen_nodes:
                used[chosen_node] += per_node
        if all(u <= size for u, size in zip(used, sizes, strict=True)):
            return True
    return False
