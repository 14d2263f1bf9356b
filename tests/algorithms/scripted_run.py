"""A run with fake models and engines, which return scripted values and record all calls.

Everything else is real: `RLRun`, its totals, and the estimators.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.algorithms import find_algorithm
from megarl.batch.pack import SampleKey, SampleRef
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config import RunConfig
from megarl.config.trainer import OffloadConfig
from megarl.data.sampler import PromptOrder, RunPrompts
from megarl.engines.engine import Sampling
from megarl.megatron.requests import ForwardRequest, TrainRequest, TrainStats
from megarl.reshard.planning.strategy import SyncStats
from megarl.rollout.estimate_job import EstimateJob
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.remote.trainer_group import AuxiliaryModels
from megarl.run.rl_run import RLRun
from megarl.run.run_parts import RunParts
from megarl.run.run_state import RunState
from megarl.run.sync.weight_sync import PushReport, WeightSync
from megarl.tracking.progress import EventLog, MessageEvent
from megarl.tracking.timing import PhaseTimer, Startup
from tests.rollout.estimates import estimate_here
from tests.run.finished_groups import completion, finished_group, run_config


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call of a fake object."""

    target: str
    method: str
    argument: Any = None


def token_values(key: SampleKey, num_tokens: int, offset: float) -> np.ndarray:
    """Return pseudo-random model outputs for the tokens of a trajectory, determined by `key`."""
    values = np.random.default_rng((*key, num_tokens)).normal(size=num_tokens) + offset
    return values.astype(np.float32)


@dataclass
class FakeModel:
    """Fake trainer or forward worker of any role."""

    name: str
    log: list[Call]
    offset: float = 0.0
    losses: Sequence[float] = (1.0,)
    """Loss of each training step; the last one repeats."""
    score: Callable[[SampleKey], float] = lambda key: 0.0
    value_key: Callable[[SampleRef], SampleKey] = lambda sample: sample.key
    """What outputs for a sample depend on."""
    metrics: Callable[[TrainRequest], dict[str, float]] = lambda request: {}
    """Further metrics of a training step."""
    offloads: bool = False
    _steps: int = 0

    @property
    def offload_config(self) -> OffloadConfig:
        return OffloadConfig(optimizer=self.offloads, gradients=self.offloads, weights=self.offloads)

    def offload(self) -> Any:
        self.log.append(Call(self.name, "offload"))
        return SimpleNamespace(device_bytes=1, host_bytes=1)

    def logprobs(self, request: ForwardRequest) -> Any:
        return self.values(request, "logprobs")

    def take_routes(self, request: ForwardRequest) -> Any:
        self.log.append(Call(self.name, "routes", request))
        return LocalPayload([{s.key: np.full((s.num_tokens, 1, 2), s.key, np.uint8) for s in request.samples}])

    def scores(self, request: ForwardRequest) -> dict[SampleKey, float]:
        self.log.append(Call(self.name, "scores", request))
        return {sample.key: self.score(self.value_key(sample)) for sample in request.samples}

    def values(self, request: ForwardRequest, method: str = "values") -> Any:
        self.log.append(Call(self.name, method, request))
        values = {s.key: token_values(self.value_key(s), s.num_tokens, self.offset) for s in request.samples}
        return LocalPayload([values])

    def train_step(self, request: TrainRequest) -> TrainStats:
        self.log.append(Call(self.name, "train", request))
        loss = self.losses[min(self._steps, len(self.losses) - 1)]
        self._steps += 1
        return TrainStats(metrics={"loss": loss, **self.metrics(request)}, num_tokens=1)

    def begin_train_step(self, request: TrainRequest) -> Any:
        stats = self.train_step(request)
        return SimpleNamespace(result=lambda: stats)


@dataclass
class FakeCheckpointer:
    """Fake checkpointer; only the last step is due."""

    log: list[Call]
    last_step: int = 0

    def is_due(self, step: int) -> bool:
        return False

    def begin(self, step: int) -> dict[str, float]:
        self.last_step = step
        self.log.append(Call("checkpoint", "begin", step))
        return {}

    def add_state(self, state: Callable[[], RunState]) -> None: ...

    def poll(self) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """Arguments of a recorded sampling call."""

    label: str
    prompts: tuple[str, ...]
    num_samples: int
    sampling: Sampling
    seed: tuple[int, ...]


RewardFunction = Callable[[str, int, int], float | None]
"""(label, index of the prompt in the call, index of the sample) -> reward; None: it failed, the sample is dropped."""


@dataclass
class FakeRolloutGroup:
    script: RewardFunction
    log: list[Call]
    lengths: Callable[[int], int] = lambda sample: 3 + sample
    """Number of sampled tokens by sample index."""
    omits_dropped: bool = False
    """Leave dropped samples out, as if they had not been sampled."""
    truncated: Callable[[str, int, int], bool] = lambda label, number, sample: False
    """Which samples are truncated, by the arguments of `script`."""
    mismatch: float = 0.0
    """What the engine's log-probabilities are off by."""
    other_rules: Sequence[str] = ()
    """Terms besides `match`, which are 0."""
    policy: FakeModel = field(init=False)
    sync: WeightSync = field(init=False)
    """Its version samples the tokens of schedules."""

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: Any = ()
    ) -> list[FinishedGroup]:
        names = tuple(prompt.prompt_id for prompt in prompts)
        call = SampleCall(label=label, prompts=names, num_samples=num_samples, sampling=sampling, seed=seed)
        self.log.append(Call("engines", "sample", call))
        groups = [[self._sample(label, n, sample) for sample in range(num_samples)] for n in range(len(prompts))]
        if self.omits_dropped:
            groups = [[sample for sample in group if not sample.reward_errors] for group in groups]
        found = [finished_group(group, number) for number, group in enumerate(groups) if group]
        return [replace(g, summary=replace(g.summary, prompt_id=names[g.summary.group_id])) for g in found]

    def open_stream(self) -> FakeGroupStream:
        return FakeGroupStream(self)

    def sample_on_each_engine(
        self, prompt: Prompt, *, sampling: Sampling, label: str, seed: tuple[int, ...]
    ) -> list[FinishedGroup]:
        """Return the probe of one engine, with log-probabilities of the fake policy plus `mismatch`."""
        self.log.append(Call("engines", "probe", label))
        probe = completion([0] + [1] * 8)
        sample: Any = SimpleNamespace(key=(0, 0), payload=0, num_tokens=probe.num_tokens)
        values = token_values(self.policy.value_key(sample), probe.num_tokens, self.policy.offset)
        logprobs = np.where(probe.loss_mask, values + self.mismatch, 0.0).astype(np.float32)
        return [finished_group([replace(probe, logprobs=logprobs)])]

    def pause_clocks(self) -> None:
        self.log.append(Call("clocks", "pause"))

    def resume_clocks(self) -> None:
        self.log.append(Call("clocks", "resume"))

    def sample_job(self, job: GroupJob, first_version: int) -> FinishedGroup:
        """Return the group that `collect` returns for the same prompt in a synchronous run.

        The first sampled token of each completion has `first_version`, the others the current version.
        """
        label, _, number = job.request_id.rpartition("-")
        group = [self._sample(label, int(number), sample) for sample in range(job.num_samples)]
        group += [self._sample(f"{label}-greedy", int(number), 0)] if job.has_baseline else []
        versions = [np.where(each.loss_mask, self.sync.policy_version, -1).astype(np.int32) for each in group]
        for each in versions:
            each[1] = first_version
        group = [replace(each, policy_versions=v) for each, v in zip(group, versions, strict=True)]
        finished = finished_group(group, int(number))
        return replace(finished, summary=replace(finished.summary, has_baseline=job.has_baseline))

    def _sample(self, label: str, number: int, sample: int) -> Trajectory:
        mask, reward = [0] + [1] * self.lengths(sample), self.script(label, number, sample)
        if reward is None:
            return completion(mask, rewards={"other": 1.0}, reward_errors={"match": "no answer"})
        finish_reason = "length" if self.truncated(label, number, sample) else "stop"
        rewards = {"match": reward, **dict.fromkeys(self.other_rules, 0.0)}
        return replace(completion(mask, reward=reward, rewards=rewards), finish_reason=finish_reason)

    def estimate(self, job: EstimateJob, groups: Sequence[FinishedGroup]) -> Any:
        found, columns = estimate_here(job, [group.payload.fetch() for group in groups])
        return found, {name: LocalPayload([column]) for name, column in columns.items()}

    def flush_records(self) -> None:
        """Do nothing: the fake writes no records."""

    def first_completion_time(self) -> float:
        return time.time()


@dataclass
class FakeGroupStream:
    """Fake of `GroupStream`: the group that was submitted last finishes first."""

    rollout: FakeRolloutGroup
    jobs: list[tuple[GroupJob, int]] = field(default_factory=list)
    """With the version at their start."""

    def submit(self, *jobs: GroupJob) -> None:
        for job in jobs:
            self.rollout.log.append(Call("engines", "sample", job))
            self.jobs.append((job, self.rollout.sync.policy_version))

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        job, first_version = self.jobs.pop()
        return [(job, self.rollout.sample_job(job, first_version))]

    def take_finished(self, seconds: float) -> list[tuple[GroupJob, FinishedGroup]]:
        return []

    def cancel(self, request_ids: Iterable[str]) -> None:
        cancelled = set(request_ids)
        self.jobs = [(job, version) for job, version in self.jobs if job.request_id not in cancelled]

    def close(self) -> None: ...


class FakeEngines:
    """Fake engines that release their memory."""

    def __init__(self, log: list[Call]) -> None:
        self.release = lambda memory: log.append(Call("engines", "release", tuple(memory)))
        self.resume = lambda memory: log.append(Call("engines", "resume", tuple(memory)))


@dataclass
class FakeModelSync:
    log: list[Call]
    model: str | None
    is_outdated: bool = False

    def release_engines(self) -> None: ...

    def push(self, policy_version: int) -> PushReport:
        self.log.append(Call("weights", f"push {self.model or ''}".strip(), policy_version))
        stats = SyncStats(bytes_sent=1, bytes_received=1, bytes_delivered=0, buckets=1, peak_extra_bytes=0)
        return PushReport(stats=stats, seconds={}, bytes_moved=1)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run with everything that it logged and called."""

    run: RLRun
    log: list[Call]
    metrics: list[dict[str, float]]
    """Logged metrics by step, without critic pretraining."""
    pretraining: list[dict[str, float]]
    messages: list[str]

    @property
    def call_order(self) -> list[str]:
        """All calls as "target method", from the first sampling call on."""
        names = [f"{call.target} {call.method}" for call in self.log]
        return names[names.index("engines sample") :]

    def arguments(self, target: str, method: str) -> list[Any]:
        return [call.argument for call in self.log if (call.target, call.method) == (target, method)]

    @property
    def pushed_versions(self) -> list[int]:
        """Policy versions pushed to the engines."""
        return self.arguments("weights", "push")


def run_script(
    folder: Path,
    algorithm: dict[str, Any],
    script: RewardFunction,
    *,
    steps: int = 1,
    models: dict[str, dict[str, Any]] | None = None,
    dedicated: frozenset[str] = frozenset(),
    events: EventLog | None = None,
    resumed: RunState | None = None,
    saves_checkpoints: bool = False,
    releases_memory: bool = False,
    rollout_fields: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **sections: Any,
) -> FinishedRun:
    """Train for `steps` with the algorithm on prompts p0 to p99; defaults: 2 prompts per step, 3 samples each.

    Args:
        models: `FakeModel` fields that differ from the defaults, by role.
        events: event log of the run, for scripts that request a stop.
        resumed: state to resume from.
        saves_checkpoints: give the run a checkpointer.
        releases_memory: the engines release their memory while the trainer needs it.
        trainer, data: further keys of these sections.
        rollout_fields: fields of `FakeRolloutGroup` that differ from the defaults.
    """
    config = run_config(
        {"prompts_per_step": 2, "group_size": 3, **algorithm},
        run_dir=str(folder),
        trainer={"steps": steps} | (trainer or {}),
        tracking={"tensorboard": False, "rollouts": False},
        data={"path": "data.jsonl", "shuffle": False} | (data or {}),
        **sections,
    )
    log: list[Call] = []
    trained, frozen = dict[str, Any](), dict[str, Any]()
    for each in config.auxiliary_models:
        fake = FakeModel(each.name, log, **(models or {}).get(each.name, {}))
        (frozen if each.optimizer is None else trained)[each.name] = fake
    models_of_run = AuxiliaryModels(trained=trained, frozen=frozen, dedicated=dedicated)
    policy = FakeModel("policy", log, **(models or {}).get("policy", {}))
    rollout = FakeRolloutGroup(script, log, **(rollout_fields or {}))
    rollout.other_rules = [name for name in config.reward.rules if name != "match"]
    fakes = FakeCheckpointer(log) if saves_checkpoints else None, FakeEngines(log) if releases_memory else None
    return train_with_fakes(config, policy, models_of_run, rollout, log, events or EventLog(), resumed, *fakes)


def train_with_fakes(
    config: RunConfig,
    trainer: Any,
    models: AuxiliaryModels,
    rollout: FakeRolloutGroup,
    log: list[Call],
    events: EventLog,
    resumed: RunState | None = None,
    checkpoints: FakeCheckpointer | None = None,
    engines: FakeEngines | None = None,
) -> FinishedRun:
    """Train a complete run on the given fakes."""
    prompts = [Prompt(prompt_id=f"p{i}", text="", token_ids=(1,), row={}) for i in range(100)]
    connect: Any = partial(FakeModelSync, log)
    rollout.sync, rollout.policy = WeightSync(connect), trainer
    stand_ins: dict[str, Any] = {"trainer": trainer, "rollout": rollout, "sync": rollout.sync}
    stand_ins |= {"checkpoints": checkpoints, "engines": engines, "models": models, "resumed": resumed}
    order = PromptOrder(len(prompts), config.seed, config.data.shuffle)
    run_prompts = RunPrompts(training=prompts, order=order)
    parts = RunParts(prompts=run_prompts, **stand_ins)
    run = RLRun(config, events, PhaseTimer(), Startup(time.time()), parts)
    find_algorithm(config.algorithm.type)().train(run, config.algorithm)
    run.save()
    run.finish()
    messages = [event.text for event in events.since(0)[0] if isinstance(event, MessageEvent)]
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return FinishedRun(
        run=run,
        log=log,
        metrics=[row for row in rows if "tokens_per_second" in row],
        pretraining=[row for row in rows if any(name.startswith("pretraining/") for name in row)],
        messages=[text for text in messages if not text.startswith("started in ")],
    )
