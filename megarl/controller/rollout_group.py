"""Rollout workers as the controller calls them: prompts in, finished groups out, their tokens left where they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.batch.pack import Column
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config import RunConfig
from megarl.controller.engines import EngineGroup
from megarl.controller.rollout_process import Rewards, RolloutProcess
from megarl.controller.tokens import EstimateJob, Findings
from megarl.errors import WorkerError
from megarl.megatron.work import TokenColumn
from megarl.placement.nodes import light_nodes
from megarl.placement.process_start import ProcessStart
from megarl.rollout.engine import Sampling
from megarl.rollout.worker import GroupJob, GroupSummary
from megarl.workers.failure import raise_failure, wait_all
from megarl.workers.payload import StoredPayload
from megarl.workers.shell import AsyncShell


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """One prompt's scored samples."""

    summary: GroupSummary
    payload: StoredPayload[list[Trajectory]]


class RolloutGroup:
    """Spreads prompts over the rollout workers, each of which balances over all engines."""

    def __init__(self, config: RunConfig, engines: EngineGroup) -> None:
        self._config = config
        self._timeout = config.rollout.request_timeout_seconds * 2
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        self.asked = time.time()
        """When Ray was asked for the workers' processes."""
        actor = ray.remote(AsyncShell)
        nodes = light_nodes()
        self._workers = []
        for index in range(config.rollout.workers):
            here = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)].id, soft=False)
            options = actor.options(num_cpus=0, max_restarts=0, max_concurrency=10_000, scheduling_strategy=here)
            worker = options.remote(environment)
            worker.expect.remote(RolloutProcess, self.asked)  # it imports for seconds, while engines start
            self._workers.append(worker)
        self._engines = engines
        self._records: list[Any] = []

    def start(self) -> None:
        """Build the workers; the engines must be up."""
        arguments = (self._config, self._engines.remote_engines())
        asked = time.time()
        refs = [worker.build.remote(RolloutProcess, arguments, {}, asked) for worker in self._workers]
        wait_all(refs, what="rollout worker start", names=self._names(refs))

    def came_up(self) -> list[ProcessStart]:
        """How each worker's process did."""
        refs = [worker.came_up.remote() for worker in self._workers]
        return wait_all(refs, what="start", names=self._names(refs))

    def first_completion(self) -> float:
        """See `EngineGroup`."""
        return self._engines.first_completion()

    def stream(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> Iterator[FinishedGroup]:
        """Groups as they finish; `group_id` is the prompt's place in `prompts`.

        Args:
            label: names the requests: `<label>-<group>-<sample>`.
            seed: what the samples' randomness follows from.

        Raises:
            RewardError, WorkerError: as the worker raised it; the first ends the stream.
        """
        payloads, names = {}, {}
        for group_id, prompt in enumerate(prompts):
            job = GroupJob(
                prompt=prompt,
                group_id=group_id,
                num_samples=num_samples,
                sampling=sampling,
                request_id=f"{label}-{group_id}",
                seed=seed,
            )
            index = group_id % len(self._workers)
            summary, payload = self._workers[index].invoke.options(num_returns=2).remote("rollout_group", job)
            payloads[summary], names[summary] = payload, f"rollout worker {index}"
        waiting = list(payloads)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=self._timeout)
            if not done:
                raise WorkerError(f"{label}: {len(waiting)} groups were not done after {self._timeout:g} s")
            raise_failure(done[0], what="rollout", name=names[done[0]])
            yield FinishedGroup(ray.get(done[0]), StoredPayload(payloads.pop(done[0])))

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> list[FinishedGroup]:
        """All groups, in the order of the prompts."""
        groups = self.stream(prompts, num_samples=num_samples, sampling=sampling, label=label, seed=seed)
        return sorted(groups, key=lambda group: group.summary.group_id)

    def estimate(
        self, job: EstimateJob, groups: Sequence[FinishedGroup]
    ) -> tuple[Findings, dict[Column, StoredPayload[TokenColumn]]]:
        """What `job` finds out of the groups' trajectories; its columns stay where they are."""
        call = self._workers[0].invoke.options(num_returns=1 + len(job.gives))
        refs = call.remote("estimate", job, *[group.payload.ref for group in groups])
        found, *columns = refs if job.gives else [refs]
        (findings,) = wait_all([found], what="estimate", names=self._names([found]))
        return findings, {name: StoredPayload(ref) for name, ref in zip(job.gives, columns, strict=True)}

    def record(self, step: int, groups: Sequence[FinishedGroup], advantages: Sequence[float]) -> None:
        """Have a worker write the step's rollouts to Parquet, while the run goes on."""
        self.finish_records()
        worker = self._workers[step % len(self._workers)]
        refs = [group.payload.ref for group in groups]
        rewards = [Rewards(t.reward, t.rewards) for group in groups for t in group.summary.trajectories]
        self._records.append(worker.invoke.remote("record", step, rewards, list(advantages), *refs))

    def finish_records(self) -> None:
        """Block until what `record` began is on disk."""
        wait_all(self._records, what="record rollouts", names=self._names(self._records))
        self._records.clear()

    def _names(self, refs: Sequence[Any]) -> dict[Any, str]:
        return {ref: f"rollout worker {i}" for i, ref in enumerate(refs)}
