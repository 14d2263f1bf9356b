"""A run whose models and engines say what a test has written down, and remember what they were asked.

Everything else is the real thing: `PolicyRun`, its books, and estimates from tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.algorithms.registry import train
from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.config.trainer import OffloadConfig
from megarl.groups.auxiliary_models import Models
from megarl.groups.estimation import EstimateJob, estimate
from megarl.groups.rollout_group import FinishedGroup
from megarl.megatron.requests import EvaluationWork, Key, TrainStats, TrainWork
from megarl.rollout.engine import Sampling
from megarl.run.events import EventLog, Note
from megarl.run.rl_run import PolicyRun
from megarl.run.run_state import RunState
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.startup import Startup
from megarl.workers.payload import LocalPayload
from tests.run.finished_groups import completion, finished, run_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call."""

    who: str
    what: str
    work: Any


def token_values(key: Key, num_tokens: int, offset: float) -> np.ndarray:
    """What a model says of a trajectory's tokens: different of each."""
    values = np.random.default_rng((*key, num_tokens)).normal(size=num_tokens) + offset
    return values.astype(np.float32)


@dataclass
class Model:
    """Of any role."""

    name: str
    log: list[Asked]
    offset: float = 0.0
    losses: Sequence[float] = (1.0,)
    """Of each training step; the last one stays."""
    score: Callable[[Key], float] = lambda key: 0.0
    offloads: bool = False
    _steps: int = 0

    @property
    def offloaded(self) -> OffloadConfig:
        return OffloadConfig(optimizer=self.offloads, gradients=self.offloads, weights=self.offloads)

    def offload(self) -> Any:
        self.log.append(Asked(who=self.name, what="offload", work=None))
        return SimpleNamespace(device_bytes=1, host_bytes=1)

    def onload(self) -> None:
        self.log.append(Asked(who=self.name, what="onload", work=None))

    def logprobs(self, work: EvaluationWork) -> Any:
        return self._tokens("logprobs", work)

    def values(self, work: EvaluationWork) -> Any:
        return self._tokens("values", work)

    def scores(self, work: EvaluationWork) -> dict[Key, float]:
        self.log.append(Asked(who=self.name, what="scores", work=work))
        return {sample.key: self.score(sample.key) for sample in work.samples}

    def _tokens(self, what: str, work: EvaluationWork) -> Any:
        self.log.append(Asked(who=self.name, what=what, work=work))
        return LocalPayload([{s.key: token_values(s.key, s.num_tokens, self.offset) for s in work.samples}])

    def train_step(self, work: TrainWork) -> TrainStats:
        self.log.append(Asked(who=self.name, what="train", work=work))
        loss = self.losses[min(self._steps, len(self.losses) - 1)]
        self._steps += 1
        return TrainStats(metrics={"loss": loss}, num_tokens=1)

    def begin_train_step(self, work: TrainWork) -> Any:
        stats = self.train_step(work)
        return SimpleNamespace(result=lambda: stats)


@dataclass
class Checkpoints:
    """Of which none is due but the last."""

    log: list[Asked]
    last_step: int = 0

    def is_due(self, step: int) -> bool:
        return False

    def begin(self, step: int) -> dict[str, float]:
        self.last_step = step
        self.log.append(Asked(who="checkpoint", what="begin", work=step))
        return {}

    def add_state(self, state: Callable[[], RunState]) -> None:
        pass

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One call of the engines."""

    label: str
    prompts: tuple[str, ...]
    num_samples: int
    sampling: Sampling
    seed: tuple[int, ...]


Script = Callable[[str, int, int], float]
"""From label, number of the prompt in the call and of the sample to the reward."""


@dataclass
class Rollout:
    script: Script
    log: list[Asked]
    lengths: Callable[[int], int] = lambda sample: 3 + sample
    """Sampled tokens."""

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: Any = ()
    ) -> list[FinishedGroup]:
        names = tuple(prompt.prompt_id for prompt in prompts)
        asked = Sampled(label=label, prompts=names, num_samples=num_samples, sampling=sampling, seed=seed)
        self.log.append(Asked(who="engines", what="sample", work=asked))
        return [
            finished(
                [
                    completion([0] + [1] * self.lengths(sample), reward=self.script(label, number, sample))
                    for sample in range(num_samples)
                ],
                number,
            )
            for number in range(len(prompts))
        ]

    def estimate(self, job: EstimateJob, groups: Sequence[FinishedGroup]) -> Any:
        found, columns = estimate(job, [group.payload.fetch() for group in groups])
        return found, {name: LocalPayload(column) for name, column in zip(job.gives, columns, strict=True)}

    def finish_records(self) -> None:
        """There are none."""

    def first_completion(self) -> float:
        return time.time()


@dataclass
class Weights:
    log: list[Asked]
    policy_version: int = -1

    def push(self, policy_version: int) -> Any:
        self.policy_version = policy_version
        self.log.append(Asked(who="weights", what="push", work=policy_version))
        return SimpleNamespace(bytes_moved=1, stats=SimpleNamespace(buckets=1), seconds={})


@dataclass(frozen=True)
class Scripted:
    """A run that is over."""

    run: PolicyRun
    log: list[Asked]
    metrics: list[dict[str, float]]
    """By step, pretraining apart."""
    pretraining: list[dict[str, float]]
    notes: list[str]

    @property
    def order(self) -> list[str]:
        """Who was asked what, from the first sample on."""
        names = [f"{asked.who} {asked.what}" for asked in self.log]
        return names[names.index("engines sample") :]

    def works(self, who: str, what: str) -> list[Any]:
        return [asked.work for asked in self.log if (asked.who, asked.what) == (who, what)]

    @property
    def pushed(self) -> list[int]:
        """Policy versions."""
        return self.works("weights", "push")


def run_script(
    folder: Path,
    algorithm: dict[str, Any],
    script: Script,
    *,
    steps: int = 1,
    models: dict[str, dict[str, Any]] | None = None,
    apart: frozenset[str] = frozenset(),
    lengths: Callable[[int], int] = lambda sample: 3 + sample,
    events: EventLog | None = None,
    resumed: RunState | None = None,
    saves: bool = False,
    **sections: Any,
) -> Scripted:
    """`steps` of the algorithm, 2 prompts and 3 samples each where it says nothing else, on prompts p0 to p99.

    Args:
        models: by role what is special about it, fields of `Model`; those of a run's roles are there anyway.
        events: of the run, where the script has something to tell it.
        resumed: what the run goes on from.
        saves: have it keep checkpoints.
    """
    config = run_config(
        {"prompts_per_step": 2, "group_size": 3, **algorithm},
        run_dir=str(folder),
        trainer={"steps": steps},
        tracking={"tensorboard": False, "rollouts": False},
        data={"path": "data.jsonl", "shuffle": False},
        **sections,
    )
    log: list[Asked] = []
    made = {r.name: Model(r.name, log, **(models or {}).get(r.name, {})) for r in config.roles}
    frozen = {role.name for role in config.roles if role.optimizer is None}
    there: Any = Models(
        trained={name: model for name, model in made.items() if name not in frozen},
        frozen={name: model for name, model in made.items() if name in frozen},
        apart=apart,
    )
    policy = Model("policy", log, **(models or {}).get("policy", {}))
    rollout, checkpoints = Rollout(script, log, lengths), Checkpoints(log) if saves else None
    return train_on(config, policy, there, rollout, log, events or EventLog(), resumed, checkpoints)


def train_on(
    config: RunConfig,
    trainer: Any,
    models: Models,
    rollout: Rollout,
    log: list[Asked],
    events: EventLog,
    resumed: RunState | None = None,
    checkpoints: Checkpoints | None = None,
) -> Scripted:
    """The run from its first push to its last, on these."""
    prompts = [Prompt(prompt_id=f"p{i}", text="", token_ids=(1,), row={}) for i in range(100)]
    stand_ins: dict[str, Any] = {
        "trainer": trainer,
        "rollout": rollout,
        "weights": Weights(log),
        "checkpoints": checkpoints,
    }
    startup = Startup(time.time())
    run = PolicyRun(
        config,
        events,
        PhaseTimer(),
        startup,
        models=models,
        prompts=prompts,
        held_out=[],
        resumed=resumed,
        **stand_ins,
    )
    train(run)
    run.save()
    run.finish()
    said = [event.text for event in events.since(0)[0] if isinstance(event, Note)]
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return Scripted(
        run=run,
        log=log,
        metrics=[row for row in rows if "reward/mean" in row],
        pretraining=[row for row in rows if any(name.startswith("pretraining/") for name in row)],
        notes=[text for text in said if not text.startswith("started in ")],
    )
