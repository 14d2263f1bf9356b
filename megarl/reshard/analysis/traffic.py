"""What ranks and machines receive in one sync, from layouts alone: at any scale, where plans of all ranks take hours.

Whatever the plan, a rank receives each box that it needs and lacks once. What enters a machine follows too, unless a
rank prefers to ask members of its group on other machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.reshard.analysis.scenario import Arrangement, Scenario
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.lower_bounds import Demand, lacking_of_nodes
from megarl.reshard.strategies.full_gather import owned_parts, whole_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one sync."""

    into_ranks: tuple[int, ...]
    """By rank, from other ranks."""
    into_nodes: dict[int, int] | None
    """By machine, from other machines; None where only plans tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a strategy brings to whom."""

    sources: Sequence[WeightLayout]
    """By rank."""
    needs: Mapping[int, WeightLayout]
    """By rank."""
    relay: bool
    """A rank of a machine hands on what others there need as well."""


def wanted(arrangement: Arrangement, scenario: Scenario) -> Wanted:
    """Of any strategy but `gather_hf`, which pads."""
    match arrangement.strategy:
        case "ds_chat" | "hybridflow_v" as method:
            sources = owned_parts(scenario.sources) if method == "ds_chat" else scenario.sources
            whole = whole_layout(scenario.sources[0])
            return Wanted(sources=sources, needs=dict.fromkeys(range(len(sources)), whole), relay=False)
    return Wanted(sources=scenario.sources, needs=arrangement.needs, relay=True)


def find_traffic(what: Wanted, groups: Sequence[Sequence[int]], topology: Topology) -> Traffic:
    """Sums over all ranks."""
    demand = Demand(what.needs.values())
    into = [0] * len(what.sources)
    for rank, need in what.needs.items():
        into[rank] = demand.lacking([what.sources[rank]], [need]).boxes
    if any(len({topology.nodes[rank] for rank in group}) > 1 for group in groups):
        return Traffic(into_ranks=tuple(into), into_nodes=None)
    if what.relay:
        nodes = lacking_of_nodes(demand, what.sources, what.needs, topology)
        return Traffic(into_ranks=tuple(into), into_nodes={node: lacking.boxes for node, lacking in nodes.items()})
    return Traffic(into_ranks=tuple(into), into_nodes=_each_fetches(demand, what, topology))


def _each_fetches(demand: Demand, what: Wanted, topology: Topology) -> dict[int, int]:
    """By machine, where every rank fetches what no rank of the machine holds."""
    held: dict[int, list[WeightLayout]] = {}
    for rank, node in enumerate(topology.nodes):
        held.setdefault(node, []).append(what.sources[rank])
    into = dict.fromkeys(held, 0)
    for rank, need in what.needs.items():
        node = topology.nodes[rank]
        into[node] += demand.lacking(held[node], [need]).boxes
    return into
