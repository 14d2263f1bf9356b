"""The stacks of a run's processes, wherever they are: on each machine a short-lived task of Ray's reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.process.stack_dump import ProcessPlace, Stacks, read_stacks
from megarl.workers.failures import wait_all

COLLECT_SECONDS = 30.0


def ask_places(shells: Mapping[str, Any], timeout: float | None = None) -> dict[str, ProcessPlace]:
    """Where the processes of these Shells or AsyncShells are, by name; to be asked while they answer.

    Raises:
        WorkerError: as `wait_all` does.
    """
    refs = {name: shell.place.remote() for name, shell in shells.items()}
    names = {ref: name for name, ref in refs.items()}
    return dict(zip(refs, wait_all(list(names), what="start", names=names, timeout=timeout), strict=True))


def collect_stacks(places: Mapping[str, ProcessPlace], timeout: float = COLLECT_SECONDS) -> str:
    """The stacks of these processes, by name, and of those below them, within `timeout` seconds.

    First a line for each process with what its main thread is in. What cannot be read is named, with the reason.
    """
    by_node: dict[str, dict[str, ProcessPlace]] = {}
    for name, place in places.items():
        by_node.setdefault(place.node_id, {})[name] = place
    task = ray.remote(read_stacks)
    refs = []
    for node_id, those in by_node.items():
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = task.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        refs.append(options.remote(those, timeout / 2))  # the other half to start its process, on a busy machine
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
    found = [_answer(ref, those, timeout) for ref, those in zip(refs, by_node.values(), strict=True)]
    lines = [line for each in found for line in each.brief]
    return "\n".join([*lines, "", *(each.text for each in found)])


def _answer(ref: Any, those: Mapping[str, ProcessPlace], timeout: float) -> Stacks:
    host = next(iter(those.values())).host
    if not ray.wait([ref], timeout=0)[0]:
        ray.cancel(ref)
        return Stacks(brief=(f"{host}: no answer within {timeout:g} s about {', '.join(those)}",), text="")
    try:
        found: Stacks = ray.get(ref)
    except RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Stacks(brief=(f"{host}: nothing about {', '.join(those)}: {reason}",), text="")
    return found
