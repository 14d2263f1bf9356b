"""How often a run's processes may be started anew, and how long to wait before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from megarl.config.recovery import RecoveryConfig
from megarl.errors import GivenUpError, MegarlError

LAST_WORDS = "the end of "
"""How what a process has written is introduced, which is seldom the same twice."""


class Restarts:
    """The budget of a run; `counts` is what it has used, by kind: "engine", "rollout worker", "trainer", "controller".

    restarts = Restarts(config.recovery, say)
    time.sleep(restarts.take("engine", error, step, who="engine 1"))
    ...
    restarts.step_done(step)
    """

    def __init__(
        self, config: RecoveryConfig, say: Callable[[str], None], counts: Mapping[str, int] | None = None
    ) -> None:
        """Args:
        counts: what an earlier process of the run has used.
        """
        self._config, self.say = config, say
        self.counts: Counter[str] = Counter(counts or {})
        self._last_step = 0
        self._recent: Counter[tuple[str, str]] = Counter()
        """By kind and who: restarts since a step was finished."""
        self._failures: Counter[tuple[str, str]] = Counter()
        """By who and normalized text, likewise."""

    def take(self, kind: str, cause: MegarlError, step: int, *, who: str = "") -> float:
        """The seconds to wait before a process is started anew, which is told to the user.

        Args:
            step: the one under way.
            who: where there are several of a kind, the one that was lost: each has its own waits and failures.

        Raises:
            MegarlError: `cause`, where nothing may be restarted.
            GivenUpError: there were too many restarts of the kind, or too many for the same reason.
        """
        if self._config.max_restarts == 0:
            raise cause
        who = who or f"the {kind}"
        used, limit = self.counts[kind], self._config.max_restarts
        if used >= limit:
            raise GivenUpError(
                f"step {step}: {who} was lost after {used} restarts of this kind "
                f"(recovery.max_restarts: {limit}): {cause}"
            ) from cause
        self._failures[who, normalized(cause)] += 1
        times = self._failures[who, normalized(cause)]
        if times >= self._config.same_failure:
            raise GivenUpError(
                f"step {step}: {who} was lost {times} times for the same reason, with no step finished in between "
                f"(recovery.same_failure: {self._config.same_failure}): {cause}"
            ) from cause
        self.counts[kind] += 1
        seconds = self._backoff(self._recent[kind, who])
        self._recent[kind, who] += 1
        when = f" in {seconds:g} s" if seconds else ""
        self.say(f"{who} was lost ({first_line(cause)}); restarting it{when}, {used + 1} of {limit}")
        return seconds

    @property
    def step(self) -> int:
        """The one under way, as far as is known here: the one behind the last that was finished."""
        return self._last_step + 1

    def step_done(self, step: int) -> None:
        """Failures from now on are new ones; a step that was finished before, and is done again, changes nothing."""
        if step > self._last_step:
            self._last_step = step
            self._recent.clear()
            self._failures.clear()

    def _backoff(self, recent: int) -> float:
        if recent == 0:
            return 0.0
        # of a large exponent only that it is large matters
        return min(self._config.backoff_seconds * 2.0 ** min(recent - 1, 60), self._config.max_backoff_seconds)


def normalized(cause: MegarlError) -> str:
    """What two failures for the same reason have in common: no pids, addresses or numbers, and no last words."""
    text = str(cause).partition(LAST_WORDS)[0]
    return re.sub(r"\b[0-9a-f]{8,}\b|0x[0-9a-f]+|\d+", "#", text)


def first_line(cause: MegarlError) -> str:
    """What happened, without last words."""
    text = str(cause).strip().partition(LAST_WORDS)[0]
    return (text.splitlines() or [type(cause).__name__])[0].strip().rstrip(";:. ")
