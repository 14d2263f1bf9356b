"""Weights of the reward terms by step, and total rewards: the sums of the terms, each times its weight.

The weights are those of the configuration, until `megarl attach RUN --set` changes them:

    <run_dir>/journal/reward-weights.jsonl      {"step": 7, "weights": {"accuracy": 1.0, "style": 0.5}}
                                                {"requested": {"style": 0.2}}
                                                {"step": 8, "weights": {"accuracy": 1.0, "style": 0.2}}

A step's line is written before it samples. A step that is trained again after a kill, or replayed, has the weights of
its line; a change takes effect in the first step without one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megarl.batch.trajectory import MAX_REWARD
from megarl.cluster.process.atomic_files import append_line, read_lines
from megarl.config import RunConfig
from megarl.config.reward import RewardsConfig
from megarl.errors import ConfigError, RewardError
from megarl.rollout.journal import journal_folder
from megarl.run.remote.rollout_group import FinishedGroup


class RewardFailures:
    """The failures of one step, by the name of the term that failed, `environment` or `engine`."""

    def __init__(self, config: RewardsConfig, completions_per_step: int, notify: Callable[[str], None]) -> None:
        """Args:
        completions_per_step: number of completions of a step without further batches.
        notify: receives one message for each term that fails for the first time in a run.
        """
        self._config, self._completions_per_step, self._notify = config, completions_per_step, notify
        self._num_completions = 0
        self._failed: Counter[str] = Counter()
        self._retried: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}
        self._notified: set[str] = set()

    def begin_step(self) -> None:
        """Forget the failures of the step before."""
        self._num_completions = 0
        self._failed.clear()
        self._retried.clear()
        self._first_errors.clear()

    def add(self, groups: Iterable[FinishedGroup]) -> None:
        """Count the completions of the groups, all of which were sampled for this step."""
        for group in groups:
            self._num_completions += len(group.summary.trajectories)
            for name, report in group.summary.terms.items():
                self._retried[name] += report.num_retried
            for errors in filter(None, group.summary.column("reward_errors")):
                for name, message in errors.items():
                    self._failed[name] += 1
                    self._first_errors.setdefault(name, message)

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of completions on which each term failed, and on which it was called twice."""
        retried = {f"reward/{name}/retried": float(num) for name, num in self._retried.items()}
        return retried | {f"reward/{name}/failed": float(self._failed[name]) for name in self._names()}

    def check(self, step: int) -> None:
        """Report terms that have failed for the first time.

        Raises:
            RewardError: a term failed on more than `reward.max_failed_share` of the step's completions.
        """
        limit = self._config.max_failed_share
        total = max(self._num_completions, self._completions_per_step)
        for name, num in self._failed.most_common():
            term = f"reward.terms.{name}" if name in self._config.terms else name
            what = f"step {step}: {term} failed on {num} of {total} completions"
            if num > limit * total:
                raise RewardError(
                    f"{what}, more than reward.max_failed_share = {limit:g} allows; the first error: "
                    f"{self._first_errors[name]}"
                )
            if name not in self._notified:
                self._notified.add(name)
                self._notify(
                    f"{what}, which are not trained on; the metric reward/{name}/failed counts them from now on; the "
                    f"first error: {self._first_errors[name]}"
                )

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self._retried, *self._failed]))


FILE = "reward-weights.jsonl"


class RewardWeights:
    """The weights of a run in progress."""

    def __init__(self, config: RunConfig, resumed: Mapping[str, float], *, writes: bool = True) -> None:
        """Args:
        resumed: weights at the checkpoint to resume from; empty for a new run.
        writes: record the weights of further steps; False: the journal is another run's.
        """
        self._path, self._writes = _path(config.run_dir), writes
        self._current = {**configured_weights(config), **resumed}
        self._num_read = 0
        """Number of bytes of the file that have been read."""
        self._by_step: dict[int, dict[str, float]] = {}
        self._requested: dict[str, float] = {}
        """Changes after the last recorded step."""

    @property
    def current(self) -> Mapping[str, float]:
        """Weight of each term of the reward in the current step."""
        return self._current

    def begin_step(self, step: int) -> dict[str, float]:
        """Take the weights of a step, and record them; return those that differ from the step before."""
        self._read()
        before, recorded = self._current, self._by_step.get(step)
        self._current = {**before, **(self._requested if recorded is None else recorded)}
        if recorded is None and self._writes:
            append_line(self._path, {"step": step, "weights": self._current})
        return {name: weight for name, weight in self._current.items() if weight != before[name]}

    def sum_up(self, group: FinishedGroup) -> FinishedGroup:
        """Return the group with its total rewards in the current step, from the terms that each completion has.

        A completion whose total is beyond `MAX_REWARD` is dropped; the term with the largest part has failed. Dropped
        completions have the total 0.
        """
        terms, errors = group.summary.column("rewards"), list(group.summary.column("reward_errors"))
        totals = [0.0] * len(errors)
        for i, of_terms in enumerate(terms):
            if errors[i]:
                continue
            total = 0.0
            for name, weight in self._current.items():
                if name in of_terms:
                    total += weight * of_terms[name]
            if abs(total) <= MAX_REWARD:
                totals[i] = total
            else:
                errors[i] = self._too_large(of_terms)
        summary = group.summary.with_columns(reward=totals, reward_errors=errors)
        return FinishedGroup(summary, group.payload, group.worker)

    def _too_large(self, terms: Mapping[str, float]) -> dict[str, str]:
        """Return the error of the term with the largest part of a total."""
        parts = {name: weight * terms[name] for name, weight in self._current.items() if name in terms}
        name = max(parts, key=lambda name: abs(parts[name]))
        return {name: f"reward.terms.{name}: its weight makes {parts[name]:g} of its value, beyond {MAX_REWARD:g}"}

    def _read(self) -> None:
        """Read the lines that were appended since the last call."""
        entries, self._num_read = read_lines(self._path, self._num_read)
        for entry in entries:
            if "step" in entry:
                self._by_step[entry["step"]] = entry["weights"]
                self._requested.clear()
            else:
                self._requested |= entry["requested"]


def configured_weights(config: RunConfig) -> dict[str, float]:
    """Return the weights of the terms that are summed up; a cost term is none of them."""
    costs = config.algorithm.cost_terms
    return {name: term.weight for name, term in config.reward.terms.items() if name not in costs}


def request_weights(run_dir: str | Path, weights: Mapping[str, float]) -> None:
    """Change weights from the next step on that has not begun; also after a restart of the controller."""
    append_line(_path(run_dir), {"requested": dict(weights)})


def parse_weights(config: RunConfig, settings: Sequence[str]) -> dict[str, float]:
    """Return the weights of `reward.terms.NAME.weight=VALUE` settings, by name of the term.

    Raises:
        ConfigError: a setting has another form, names another key or term, or its value is not a finite number.
    """
    known, weights = configured_weights(config), dict[str, float]()
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or len(parts) != 4 or parts[:2] != ["reward", "terms"] or parts[3] != "weight":
            raise ConfigError(
                f"--set needs reward.terms.NAME.weight=VALUE, as other keys cannot change during a run, got {setting!r}"
            )
        if parts[2] not in known:
            raise ConfigError(
                f"--set {key}: needs a term of the run's reward, one of {', '.join(known)}, got {parts[2]!r}"
            )
        try:
            weights[parts[2]] = float(text)
        except ValueError:
            weights[parts[2]] = math.nan
        if not math.isfinite(weights[parts[2]]):
            raise ConfigError(f"--set {key}: needs a finite number, got {text!r}")
    return weights


def _path(run_dir: str | Path) -> Path:
    return journal_folder(run_dir) / FILE
