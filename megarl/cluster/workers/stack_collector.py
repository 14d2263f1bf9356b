"""Collects the stacks of a run's processes on all nodes: one short-lived Ray task per node reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.process.stack_dump import ProcessInfo, Stacks, read_stacks
from megarl.cluster.workers.failures import results_in_time, wait_all

COLLECT_TIMEOUT_SECONDS = 30.0


def query_processes(hosts: Mapping[str, Any], timeout: float | None = None) -> dict[str, ProcessInfo]:
    """Return host and pid of the processes of these (async) worker hosts, by name; call it while they answer.

    Raises:
        WorkerError: a process died or did not answer within `timeout` seconds.
    """
    refs = {name: worker_host.process_info.remote() for name, worker_host in hosts.items()}
    names = {ref: name for name, ref in refs.items()}
    return dict(zip(refs, wait_all(list(names), what="start", names=names, timeout=timeout), strict=True))


def find_processes(hosts: Mapping[str, Any], timeout: float) -> dict[str, ProcessInfo]:
    """Return host and pid of those of these worker hosts that answer within `timeout` seconds, by name."""
    names = {worker_host.process_info.remote(): name for name, worker_host in hosts.items()}
    return {names[ref]: info for ref, info in results_in_time(names, timeout).items()}


def collect_stacks(processes: Mapping[str, ProcessInfo], timeout: float = COLLECT_TIMEOUT_SECONDS) -> str:
    """Return the stacks of these processes and of their descendants as text, after at most `timeout` seconds.

    The text starts with one line per process that names the function its main thread is in. Processes that cannot be
    read are listed with the reason.
    """
    by_node: dict[str, dict[str, ProcessInfo]] = {}
    for name, info in processes.items():
        by_node.setdefault(info.node_id, {})[name] = info
    task = ray.remote(read_stacks)
    refs = []
    for node_id, node_processes in by_node.items():
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = task.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        # the other half of the time is for starting the task's process on a busy node
        refs.append(options.remote(node_processes, timeout / 2))
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
    found = [
        _result_or_reason(ref, node_processes, timeout)
        for ref, node_processes in zip(refs, by_node.values(), strict=True)
    ]
    lines = [line for each in found for line in each.summary_lines]
    return "\n".join([*lines, "", *(each.text for each in found)])


def _result_or_reason(ref: Any, node_processes: Mapping[str, ProcessInfo], timeout: float) -> Stacks:
    host = next(iter(node_processes.values())).host
    if not ray.wait([ref], timeout=0)[0]:
        ray.cancel(ref)
        return Stacks(
            summary_lines=(f"{host}: no stacks within {timeout:g} s of {', '.join(node_processes)}",), text=""
        )
    try:
        found: Stacks = ray.get(ref)
    except RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Stacks(summary_lines=(f"{host}: no stacks of {', '.join(node_processes)}: {reason}",), text="")
    return found
