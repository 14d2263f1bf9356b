"""Times verl's dispatch of a batch to its ranks. Runs in verl's environment and does not import megarl."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
import torch
from verl.protocol import DataProto
from verl.single_controller.base.decorator import dispatch_nd_compute_dataproto
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.base import RayWorkerGroup


class Process:
    """Stands in for the ranks, or the rollout workers, of a process."""

    def sample(self, trajectories: int, tokens: int) -> DataProto:
        """Return the samples of a rollout worker, which lie in Ray's object store from then on."""
        return make_batch(trajectories, tokens)

    def hold(self, data: DataProto) -> int:
        """Return the bytes of the samples, which Ray has made ready for this rank."""
        return sum(int(values.nbytes) for values in data.batch.values())


class SharedProcesses(RayWorkerGroup):  # type: ignore[misc]
    """A worker group whose ranks share a few processes."""

    def __init__(self, actors: list[Any]) -> None:
        WorkerGroup.__init__(self, resource_pool=None)
        self._workers, self._world_size = actors, len(actors)

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(worker, method_name).remote(*args, **kwargs)


def make_batch(trajectories: int, tokens: int) -> DataProto:
    """Return trajectories of equal length, without padding, in 13 bytes per token as megarl's."""
    shape = trajectories, tokens
    return DataProto.from_dict(
        tensors={
            "token_ids": torch.zeros(shape, dtype=torch.int32),
            "loss_mask": torch.ones(shape, dtype=torch.bool),
            "logprobs": torch.zeros(shape),
            "policy_versions": torch.ones(shape, dtype=torch.int32),
        }
    )


def main() -> None:
    """Print by repetition the CPU seconds of the controller, and the bytes of token data that it receives and sends.

    It collects the samples, and dispatches them until every rank holds its own.
    """
    spec = json.loads(sys.argv[1])
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=spec["store_bytes"],
    )
    processes = [ray.remote(Process).options(num_cpus=0).remote() for _ in range(spec["processes"])]
    ranks, replicas, per_replica = spec["ranks"], spec["replicas"], spec["trajectories_per_replica"]
    group = SharedProcesses([processes[rank * len(processes) // ranks] for rank in range(ranks)])
    dp_ranks = [rank * replicas // ranks for rank in range(ranks)]
    found = []
    for _ in range(spec["repetitions"] + 1):  # the first one starts threads and imports
        sampled = [
            processes[part % len(processes)].sample.remote(per_replica, spec["tokens"]) for part in range(replicas)
        ]
        ray.wait(sampled, num_returns=replicas, fetch_local=False)
        cpu = time.process_time()
        batch = DataProto.concat(ray.get(sampled))
        arguments, _ = dispatch_nd_compute_dataproto(dp_ranks, replicas, group, batch)
        held = ray.get(group.execute_all_async("hold", *arguments))
        num_bytes = 13 * len(batch) * spec["tokens"]
        found.append({"cpu_seconds": time.process_time() - cpu, "bytes": 2 * num_bytes})
        assert sum(held) == num_bytes * (ranks // replicas), held
    print(json.dumps(found[1:]))


if __name__ == "__main__":
    main()
