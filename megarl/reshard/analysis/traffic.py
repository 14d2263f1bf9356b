"""Bytes received by ranks and nodes in one sync, computed from layouts without plans.

This works at any scale; planning all ranks can take hours. Whatever the plan, a rank receives each box that it needs
and does not hold exactly once. The bytes that enter a node follow too, unless ranks prefer sources in their group that
are on other nodes, or one rank of the node needs a box twice and another needs it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.reshard.analysis.scenario import Arrangement, Scenario
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.lower_bounds import NeedIndex, missing_by_node
from megarl.reshard.strategies.full_gather import full_layout, owned_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes received in one sync."""

    into_ranks: tuple[int, ...]
    """By rank, bytes received from other ranks."""
    into_nodes: dict[int, int] | None
    """By node, bytes received from other nodes; None if only plans can determine it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSpec:
    """Inputs that determine the traffic of a strategy."""

    sources: Sequence[WeightLayout]
    """By rank, the layout it holds."""
    needs: Mapping[int, WeightLayout]
    """By rank, the layout it needs."""
    relay: bool
    """Whether a box enters a node once and is relayed to the other ranks there."""


def make_traffic_spec(arrangement: Arrangement, scenario: Scenario) -> TrafficSpec:
    """Return the traffic inputs of a strategy other than `gather_hf`, whose padding they do not cover."""
    match arrangement.strategy:
        case "ds_chat" | "hybridflow_v" as method:
            sources = owned_parts(scenario.sources) if method == "ds_chat" else scenario.sources
            full = full_layout(scenario.sources[0])
            return TrafficSpec(sources=sources, needs=dict.fromkeys(range(len(sources)), full), relay=False)
    return TrafficSpec(sources=scenario.sources, needs=arrangement.needs, relay=True)


def compute_traffic(spec: TrafficSpec, groups: Sequence[Sequence[int]], topology: Topology) -> Traffic:
    """Sum up the bytes that every rank and every node receives."""
    need_index = NeedIndex(spec.needs.values())
    into = [0] * len(spec.sources)
    for rank, need in spec.needs.items():
        into[rank] = need_index.missing([spec.sources[rank]], [need]).boxes
    if any(len({topology.nodes[rank] for rank in group}) > 1 for group in groups):
        return Traffic(into_ranks=tuple(into), into_nodes=None)
    if spec.relay:
        nodes = missing_by_node(need_index, spec.sources, spec.needs, topology)
        known = not any(missing.uneven for missing in nodes.values())
        return Traffic(into_ranks=tuple(into), into_nodes={n: m.boxes for n, m in nodes.items()} if known else None)
    return Traffic(into_ranks=tuple(into), into_nodes=_traffic_without_relay(need_index, spec, topology))


def _traffic_without_relay(need_index: NeedIndex, spec: TrafficSpec, topology: Topology) -> dict[int, int]:
    """Return, by node, the bytes received if every rank itself fetches what no rank of its node holds."""
    held: dict[int, list[WeightLayout]] = {}
    for rank, node in enumerate(topology.nodes):
        held.setdefault(node, []).append(spec.sources[rank])
    into = dict.fromkeys(held, 0)
    for rank, need in spec.needs.items():
        node = topology.nodes[rank]
        into[node] += need_index.missing(held[node], [need]).boxes
    return into
