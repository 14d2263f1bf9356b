"""Differences between a run's configuration and that of the checkpoint it resumes from; some keys may change."""

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
    "data.sources.*.path",
    "dpo.reference.parallel",
    "export_dir",
    "limits",
    "model.hub_revisions",
    "model.path",
    "placement",
    "recovery",
    "reward.max_failed_share",
    "reward.terms.*.api_key_env",
    "reward.terms.*.max_batch_size",
    "reward.terms.*.max_concurrent",
    "reward.terms.*.max_concurrent_requests",
    "reward.terms.*.max_retries",
    "reward.terms.*.parallel",
    "reward.terms.*.timeout_seconds",
    "reward.terms.*.url",
    "rollout.engine",
    "rollout.no_progress_seconds",
    "rollout.replicas",
    "rollout.request_timeout_seconds",
    "rollout.tp",
    "rollout.workers",
    "run_dir",
    "schedule.late",
    "schedule.lookahead",
    "schedule.max_staleness",
    "schedule.update",
    "tracking",
    "trainer.eval_every",
    "trainer.fused_lm_head",
    "trainer.max_tokens_per_micro_batch",
    "trainer.megatron.ddp",
    "trainer.offload",
    "trainer.parallel",
    "trainer.profile",
    "trainer.recompute",
    "trainer.steps",
    "trainer.timeout_seconds",
    "weight_sync",
)
"""Keys, with everything below them, that may change on resume: they set where and how a run computes, not what.

Paths may change because files may have moved; that model and data are the same is checked separately.
"""


class _Absent:
    """Type of `ABSENT`, which stands for the value of a missing key."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDifference:
    """A configuration key whose saved and current values differ."""

    path: str
    """Dotted path as in YAML: `trainer.optimizer.lr`."""
    saved: Any
    """`ABSENT` if the key is missing."""
    current: Any
    """`ABSENT` if the key is missing."""
    allowed: bool
    """Whether the key may change on resume."""

    def __str__(self) -> str:
        verdict = "allowed" if self.allowed else "contradicts"
        saved, current = (repr(each) if each is ABSENT else json.dumps(each) for each in (self.saved, self.current))
        return f"{self.path}: {saved} was saved, got {current} ({verdict})"


def diff_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return every key whose value differs, sorted by path.

    Args:
        saved: configuration of the checkpoint, from `model_dump(mode="json")`.
        current: configuration of the run that resumes from it, in the same form.
    """
    lr_decays = _uses_lr_decay(saved) or _uses_lr_decay(current)
    return [
        ConfigDifference(path=path, saved=before, current=after, allowed=_is_allowed(path, lr_decays=lr_decays))
        for path, before, after in sorted(_unequal_keys(saved, current, ""), key=lambda each: each[0])
    ]


def require_no_contradictions(found: Sequence[ConfigDifference], checkpoint_name: str) -> None:
    """Return if all differences are allowed.

    Raises:
        ConfigError: one is not. The message lists all differences, one per line, those not allowed first.
    """
    if all(each.allowed for each in found):
        return
    lines = "\n".join(f"  {each}" for each in sorted(found, key=lambda each: each.allowed))
    raise ConfigError(
        f"the configuration contradicts that of checkpoint {checkpoint_name}:\n{lines}\n"
        "restore the saved values of the keys marked `contradicts`, or start a new run in another run_dir"
    )


def _unequal_keys(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in {**saved, **current}:
        before, after = saved.get(key, ABSENT), current.get(key, ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _unequal_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def _is_allowed(path: str, *, lr_decays: bool) -> bool:
    if path == "trainer.steps":
        return not lr_decays
    parts = path.split(".")
    return any(
        len(parts) >= len(keys) and all(map(fnmatchcase, parts, keys)) for keys in (each.split(".") for each in ALLOWED)
    )


def _uses_lr_decay(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate of any trained model depends on the total number of steps."""
    algorithm = config.get("algorithm", {})
    trained = [config.get("trainer", {}), *(each for each in algorithm.values() if isinstance(each, Mapping))]
    return any(each.get("optimizer", {}).get("decay", "constant") != "constant" for each in trained)
