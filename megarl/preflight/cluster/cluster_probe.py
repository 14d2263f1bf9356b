"""Asks every node of a cluster, through an agent on each.

driver ---> agent on node a   versions, clock, facts      knock at b, c      reduce with b, c
       |--> agent on node b                               knock at a, c
       `--> agent on node c                               knock at a, b
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.placement.nodes import ClusterNode
from megarl.preflight.cluster.findings import ANSWER, REDUCTION, Problem, Unreached, merged, unreached_problems
from megarl.preflight.cluster.node_report import Clock, NodeReport, Question
from megarl.preflight.cluster.probe_actor import Backend, NodeAgent, Reduction
from megarl.preflight.cluster.reachability import Address, Interface

KNOCK_SECONDS = 5.0
"""How long a connection between two nodes may take."""

GRACE_SECONDS = 2.0
"""How long nodes may take to say that a reduction was in vain: who then has not answered was not in it."""

GPU_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""An agent asks for no GPU of Ray's, and sees all that Ray has to give."""


@contextmanager
def surveyed(nodes: Sequence[ClusterNode], *, timeout_seconds: float) -> Iterator[Survey]:
    """An agent on each node for the time of the block; none needs a slot.

    Args:
        timeout_seconds: for each answer.
    """
    actor = ray.remote(NodeAgent)
    agents: list[Any] = []
    try:
        for node in nodes:
            options: dict[str, Any] = {"runtime_env": {"env_vars": GPU_VARIABLES}} if node.gpus else {}
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
            agents.append(actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy, **options).remote())
        yield Survey(nodes, agents, timeout_seconds)
    finally:
        for agent in agents:
            ray.kill(agent)


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    failure: str | None = None
    is_late: bool = False


class Survey:
    """The agents, and what is asked of them. Nodes are known by their index."""

    def __init__(self, nodes: Sequence[ClusterNode], agents: Sequence[Any], timeout_seconds: float) -> None:
        self._nodes, self._agents, self.timeout_seconds = nodes, agents, timeout_seconds

    def reports(self, question: Question) -> list[NodeReport]:
        """What every node says, or why it does not."""
        names = _distinct([node.name for node in self._nodes])
        reports = [
            NodeReport(
                name=name, address=node.address, gpus=node.gpus, failure=answer.failure, versions=answer.value or {}
            )
            for name, node, answer in zip(
                names, self._nodes, self._ask([agent.versions.remote() for agent in self._agents]), strict=True
            )
        ]
        answered = [i for i, report in enumerate(reports) if report.failure is None]
        for i in answered:
            reports[i] = replace(reports[i], clock=self._clock(self._agents[i]))
        facts = self._ask([self._agents[i].collect.remote(question) for i in answered])
        for i, answer in zip(answered, facts, strict=True):
            reports[i] = replace(reports[i], facts=answer.value, failure=answer.failure)
        return reports

    def unreached(self, reports: Sequence[NodeReport]) -> list[Problem]:
        """Nodes that others cannot connect to, at Ray's address or at gloo's; of those that have answered."""
        asked = [i for i, report in enumerate(reports) if report.facts is not None]
        doors = self._ask([self._agents[i].open_door.remote(str(i), reports[i].address) for i in asked])
        problems = [_unanswered(reports[i], door) for i, door in zip(asked, doors, strict=True) if door.failure]
        ports = {i: door.value for i, door in zip(asked, doors, strict=True) if not door.failure}
        is_one_machine = len({report.address for report in reports}) == 1
        addresses = [
            Address(name=str(i), host=host, port=port)
            for i, port in ports.items()
            for host in _hosts(reports[i], is_one_machine)
        ]
        others = {i: [address for address in addresses if address.name != str(i)] for i in ports}
        seconds = min(KNOCK_SECONDS, self.timeout_seconds)
        answers = self._ask([self._agents[i].knock.remote(others[i], seconds) for i in ports])
        missed: list[Unreached] = []
        for i, answer in zip(ports, answers, strict=True):
            if answer.failure:
                problems.append(_unanswered(reports[i], answer))
                continue
            for door, reason in zip(others[i], answer.value, strict=True):
                if reason is not None:
                    target = reports[int(door.name)]
                    missed.append(
                        Unreached(
                            source=reports[i].name, target=target.name, address=_shown(target, door), reason=reason
                        )
                    )
        return [*merged(problems), *unreached_problems(missed, len(reports))]

    def reduce(self, reports: Sequence[NodeReport], backend: Backend) -> list[Problem]:
        """Nodes that do not come to a reduction over all, or that it fails on; every node has answered until here."""
        members = _members(reports, backend)
        if len(members) < 2:
            return []
        first = members[0]
        (store,) = self._ask([self._agents[first].open_store.remote(reports[first].address, self.timeout_seconds)])
        if store.failure:
            return [_not_reduced(reports[first], backend, store)]
        reductions = [
            Reduction(
                backend=backend,
                host=reports[first].address,
                port=store.value,
                rank=rank,
                size=len(members),
                timeout_seconds=self.timeout_seconds,
                gpu=_idlest_gpu(reports[i]) if backend == "nccl" else None,
            )
            for rank, i in enumerate(members)
        ]
        refs = [self._agents[i].reduce.remote(one) for i, one in zip(members, reductions, strict=True)]
        failed = [
            (reports[i], answer)
            for i, answer in zip(members, self._ask(refs, GRACE_SECONDS), strict=True)
            if answer.failure
        ]
        late = [(report, answer) for report, answer in failed if answer.is_late]
        # who does not come fails the others
        return merged([_not_reduced(report, backend, answer) for report, answer in late or failed])

    def _clock(self, agent: Any) -> Clock | None:
        """None where the agent does not answer; it will be said of what it is asked next."""
        asked = time.time()
        (answer,) = self._ask([agent.clock.remote()])
        if answer.failure:
            return None
        took = time.time() - asked
        return Clock(ahead_seconds=answer.value - asked - took / 2, uncertainty_seconds=took / 2)

    def _ask(self, refs: Sequence[Any], grace_seconds: float = 0.0) -> list[_Answer]:
        """What comes within the timeout, in the order of the references."""
        if not refs:
            return []
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=self.timeout_seconds + grace_seconds)
        in_time = set(done)
        late = _Answer(failure=f"no answer within {self.timeout_seconds:g} s", is_late=True)
        return [_answer(ref) if ref in in_time else late for ref in refs]


def _answer(ref: Any) -> _Answer:
    try:
        return _Answer(ray.get(ref))
    except RayTaskError as error:
        cause = error.cause or error
        return _Answer(failure=f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}")
    except RayError as error:
        # a process that did not come up says why at the end of its trace
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _Answer(failure=f"no process of megarl runs there: {lines[-1] if lines else type(error).__name__}")


def _unanswered(report: NodeReport, answer: _Answer) -> Problem:
    return Problem(about=ANSWER, nodes=(report.name,), says=str(answer.failure))


def _not_reduced(report: NodeReport, backend: Backend, answer: _Answer) -> Problem:
    assert report.facts is not None, report
    gloo = report.facts.gloo
    over = (
        f"NCCL, NCCL_SOCKET_IFNAME={report.facts.nccl or 'not set'}"
        if backend == "nccl"
        else f"{_gloo(gloo)} ({gloo.address})"
    )
    says = f"did not add up a number with the other nodes over {over}: {answer.failure}"
    return Problem(about=REDUCTION, nodes=(report.name,), says=says)


def _distinct(names: Sequence[str]) -> list[str]:
    """Nodes of one machine that have no ranks are numbered."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return result


def _hosts(report: NodeReport, is_one_machine: bool) -> list[str]:
    """Addresses at which others must reach the node; a loopback leads to it only where all are one machine."""
    assert report.facts is not None, report
    gloo = report.facts.gloo
    counts = gloo.address is not None and (is_one_machine or not gloo.is_loopback)
    return list(dict.fromkeys([report.address, *([gloo.address] if counts and gloo.address else [])]))


def _shown(report: NodeReport, door: Address) -> str:
    """With what makes processes of the node listen there."""
    if report.facts is None or door.host == report.address:
        return str(door)
    return f"{door} ({_gloo(report.facts.gloo)})"


def _gloo(interface: Interface) -> str:
    why = "GLOO_SOCKET_IFNAME" if interface.is_chosen else "its host name"
    return f"gloo on {interface.name or 'an unknown interface'}, by {why}"


def _members(reports: Sequence[NodeReport], backend: Backend) -> list[int]:
    """Indices of the nodes that reduce; NCCL refuses two ranks on one GPU, which nodes of one machine could be."""
    if backend == "gloo":
        return list(range(len(reports)))
    machines: dict[str, int] = {}
    for i, report in enumerate(reports):
        if report.facts is not None and report.facts.gpus:
            machines.setdefault(report.address, i)
    return list(machines.values())


def _idlest_gpu(report: NodeReport) -> int:
    """Its index among those that the agent sees."""
    assert report.facts is not None, report
    used = [gpu.used_bytes or 0 for gpu in report.facts.gpus]
    return used.index(min(used))
