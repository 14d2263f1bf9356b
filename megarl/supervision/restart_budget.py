"""How many times the processes of a run may be restarted, and how long to wait before each restart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from megarl.config.recovery import RecoveryConfig
from megarl.errors import MegarlError, RestartLimitError
from megarl.process.log_tail import LOG_TAIL_PREFIX


class RestartBudget:
    """Restart budget of a run. `counts`: restarts by kind: "engine", "rollout worker", "trainer", "controller".

    budget = RestartBudget(config.recovery, notify)
    time.sleep(budget.spend("engine", error, step, worker="engine 1"))
    ...
    budget.mark_step_done(step)
    """

    def __init__(
        self, config: RecoveryConfig, notify: Callable[[str], None], counts: Mapping[str, int] | None = None
    ) -> None:
        """Args:
        notify: shows the user a line.
        counts: restarts that an earlier process of the run has used.
        """
        self._config, self.notify = config, notify
        self.counts: Counter[str] = Counter(counts or {})
        self._last_step = 0
        self._recent: Counter[tuple[str, str]] = Counter()
        """Restarts since the last completed step, by kind and worker."""
        self._failures: Counter[tuple[str, str]] = Counter()
        """Failures since the last completed step, by worker and normalized message."""

    def spend(self, kind: str, cause: MegarlError, step: int, *, worker: str = "") -> float:
        """Spend one restart and report it to the user; return the seconds to wait before restarting.

        Args:
            kind: key of `counts`, all of which have the same limit.
            step: the step in progress.
            worker: the process that was lost, where there are several of a kind: backoff and identical failures are
                counted for each.

        Raises:
            MegarlError: `cause`, where restarts are disabled.
            RestartLimitError: too many restarts of this kind, or too many identical failures.
        """
        if self._config.max_restarts == 0:
            raise cause
        worker = worker or f"the {kind}"
        used, limit = self.counts[kind], self._config.max_restarts
        if used >= limit:
            raise RestartLimitError(
                f"step {step}: {worker} was lost after {used} restarts of this kind "
                f"(recovery.max_restarts: {limit}): {cause}"
            ) from cause
        self._failures[worker, normalize_failure(cause)] += 1
        times = self._failures[worker, normalize_failure(cause)]
        if times >= self._config.max_identical_failures:
            raise RestartLimitError(
                f"step {step}: {worker} was lost {times} times for the same reason, with no step completed in between "
                f"(recovery.max_identical_failures: {self._config.max_identical_failures}): {cause}"
            ) from cause
        self.counts[kind] += 1
        seconds = self._backoff(self._recent[kind, worker])
        self._recent[kind, worker] += 1
        when = f" in {seconds:g} s" if seconds else ""
        self.notify(f"{worker} was lost ({first_line(cause)}); restarting it{when} (restart {used + 1} of {limit})")
        return seconds

    @property
    def step(self) -> int:
        """The step in progress as far as is known here: the one after the last completed step."""
        return self._last_step + 1

    def mark_step_done(self, step: int) -> None:
        """Reset backoff and identical failures; a step that was completed before and is repeated has no effect."""
        if step > self._last_step:
            self._last_step = step
            self._recent.clear()
            self._failures.clear()

    def _backoff(self, recent: int) -> float:
        if recent == 0:
            return 0.0
        # the cap keeps 2.0 ** n finite; `max_backoff_seconds` applies long before
        return min(self._config.backoff_seconds * 2.0 ** min(recent - 1, 60), self._config.max_backoff_seconds)


def normalize_failure(cause: MegarlError) -> str:
    """Return the text that identical failures share: without pids, addresses, numbers and log tail."""
    text = str(cause).partition(LOG_TAIL_PREFIX)[0]
    return re.sub(r"\b[0-9a-f]{8,}\b|0x[0-9a-f]+|\d+", "#", text)


def first_line(cause: MegarlError) -> str:
    """Return the first line of the error message, without log tail."""
    text = str(cause).strip().partition(LOG_TAIL_PREFIX)[0]
    return (text.splitlines() or [type(cause).__name__])[0].strip().rstrip(";:. ")
