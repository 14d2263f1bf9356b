"""Counts the completions on which rewards, environments or engines failed; ends a run in which too many do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from megarl.config.reward import RewardsConfig
from megarl.errors import RewardError
from megarl.groups.group_stream import FinishedGroup


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
