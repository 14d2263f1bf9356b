"""In what a run's configuration differs from the one that its checkpoint was saved with, and whether it may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from megarl.errors import ConfigError

ALLOWED = (
    "algorithm.*.parallel",
    "checkpoint",
    "data.path",
    "dpo.reference.parallel",
    "export_dir",
    "limits",
    "model.path",
    "placement",
    "recovery",
    "reward.terms.*.parallel",
    "rollout.engine",
    "rollout.replicas",
    "rollout.request_timeout_seconds",
    "rollout.tp",
    "rollout.workers",
    "run_dir",
    "tracking",
    "trainer.eval_every",
    "trainer.max_tokens_per_micro_batch",
    "trainer.offload",
    "trainer.parallel",
    "trainer.recompute",
    "trainer.steps",
    "weight_sync",
)
"""Keys that may change between two parts of a run, and all below them: where and how it computes, not what.

A file may have moved; whether model and data are the same is checked apart.
"""


class _Absent:
    """What a key has that is not there."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key with two values."""

    path: str
    """As in YAML: `trainer.optimizer.lr`."""
    saved: Any
    now: Any
    """`ABSENT` where there is no such key."""
    allowed: bool

    def __str__(self) -> str:
        may = "allowed" if self.allowed else "contradicts"
        saved, now = (repr(each) if each is ABSENT else json.dumps(each) for each in (self.saved, self.now))
        return f"{self.path}: {saved} was saved, got {now} ({may})"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Every key that differs, by path.

    Args:
        saved: the configuration of the checkpoint, as `model_dump(mode="json")` gives it.
        now: that of the run which is to go on from it.
    """
    scheduled = _is_scheduled(saved) or _is_scheduled(now)
    return [
        Difference(path=path, saved=before, now=after, allowed=_is_allowed(path, scheduled=scheduled))
        for path, before, after in sorted(_unequal(saved, now, ""), key=lambda each: each[0])
    ]


def require_no_contradictions(found: Sequence[Difference], checkpoint_name: str) -> None:
    """Return if all differences are allowed.

    Raises:
        ConfigError: one is not; every difference, one a line, those first that are not allowed.
    """
    if all(each.allowed for each in found):
        return
    lines = "\n".join(f"  {each}" for each in sorted(found, key=lambda each: each.allowed))
    raise ConfigError(
        f"the configuration contradicts that of checkpoint {checkpoint_name}:\n{lines}\n"
        "set what contradicts back to what was saved, or begin a run of its own in another run_dir"
    )


def _unequal(saved: Mapping[str, Any], now: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, Any]]:
    for key in {**saved, **now}:
        before, after = saved.get(key, ABSENT), now.get(key, ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _unequal(before, after, f"{above}{key}.")
        elif before != after:
            yield f"{above}{key}", before, after


def _is_allowed(path: str, *, scheduled: bool) -> bool:
    if path == "trainer.steps":
        return not scheduled
    parts = path.split(".")
    return any(
        len(parts) >= len(keys) and all(map(fnmatchcase, parts, keys)) for keys in (each.split(".") for each in ALLOWED)
    )


def _is_scheduled(config: Mapping[str, Any]) -> bool:
    """Whether a learning rate depends on how many steps there are."""
    algorithm = config.get("algorithm", {})
    trained = [config.get("trainer", {}), *(each for each in algorithm.values() if isinstance(each, Mapping))]
    return any(each.get("optimizer", {}).get("decay", "constant") != "constant" for each in trained)
