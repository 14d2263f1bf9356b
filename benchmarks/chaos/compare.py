"""Compares the training results of two runs bitwise.

weights, optimizer    every tensor and other value of the last checkpoints: weights, master weights, both moments,
                      step counts, learning rate, RNG states; the controller's state except times
model                 bytes of the exported safetensors files
prompts               prompt ids of each step, in order
trajectories          every column of each step's rollouts: tokens, log-probabilities, rewards, advantages, versions
metrics               metrics of each step, logged once, except times and sizes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.read import Rollouts, Step, read_last_checkpoint, read_metrics, read_model, read_rollouts
from benchmarks.chaos.watch import Line
from megarl.checkpoint.compare import is_bitwise_equal
from megarl.errors import DataError

COMPARED = ("checkpoint", "model", "prompts", "trajectories", "metrics")

METRIC_NAMES = ("loss", "grad_norm", "learning_rate", "entropy")
METRIC_GROUPS = ("reward/", "response/", "advantage/", "policy/", "policy_version/", "train_infer_mismatch/", "kl/")
"""Prefixes of the metrics that depend only on training; with `METRIC_NAMES`, those that are compared."""

MAX_SHOWN = 5
"""Largest number of differences reported per kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of comparing a disturbed run with an undisturbed one."""

    bitwise_equal: bool
    prompts_lost: int
    """Prompts that only the undisturbed run trained on; a prompt counts once per draw."""
    prompts_repeated: int
    """Prompts that only the disturbed run trained on, counted likewise."""
    trajectories_repeated: int
    """Samples of the same prompt and step that were trained on or logged more than once."""
    differences: list[str]
    """One line per difference, at most `MAX_SHOWN` per kind."""


def require_complete(run: Path) -> None:
    """Check that the folder of the undisturbed run has everything that is compared.

    Raises:
        DataError: something is missing.
    """
    for what, values in _read_parts(run).items():
        if not values:
            raise DataError(f"{run} is incomplete, it has no {what}")


def compare(undisturbed: Path, disturbed: Path) -> Comparison:
    """Compare two run folders, as described in the module; what the disturbed run lacks counts as a difference."""
    parts, of_other = _read_parts(undisturbed), _read_parts(disturbed)
    differences = [line for what, values in parts.items() for line in _differences(what, values, of_other[what])]
    rollouts, others = read_rollouts(undisturbed), read_rollouts(disturbed)
    drawn, other_drawn = _count_prompts(rollouts), _count_prompts(others)
    return Comparison(
        bitwise_equal=not differences,
        prompts_lost=(drawn - other_drawn).total(),
        prompts_repeated=(other_drawn - drawn).total(),
        trajectories_repeated=_count_repeated(rollouts, others, read_metrics(disturbed)),
        differences=differences,
    )


def _read_parts(run: Path) -> dict[str, Mapping[Any, Any]]:
    """Return everything that is compared: kind -> name or step -> value."""
    rollouts = read_rollouts(run)
    return {
        "checkpoint": read_last_checkpoint(run),
        "model": read_model(run / "model"),
        "prompts of step": rollouts.prompt_ids,
        "trajectories of step": rollouts.rows,
        "metrics of step": _training_metrics(read_metrics(run)),
    }


def _count_prompts(rollouts: Rollouts) -> Counter[str]:
    return Counter(prompt for prompt_ids in rollouts.prompt_ids.values() for prompt in prompt_ids)


def _count_repeated(rollouts: Rollouts, others: Rollouts, lines: Mapping[Step, list[Line]]) -> int:
    """Sum over steps the larger of two counts: samples written twice, and samples of a step that was logged twice."""
    written, trained = Counter[Step](), Counter[Step]()
    for (step, _), count in (others.samples - rollouts.samples).items():
        written[step] += count
    for (step, _), count in rollouts.samples.items():
        trained[step] += count * (len(lines.get(step, ())) - 1)
    return sum(max(written[step], trained[step]) for step in {*written, *trained})


def _training_metrics(lines: Mapping[Step, list[Line]]) -> dict[Step, list[dict[str, float | None]]]:
    return {
        step: [{k: v for k, v in line.items() if _is_training_metric(k)} for line in of] for step, of in lines.items()
    }


def _is_training_metric(name: str) -> bool:
    is_duration = "/seconds_" in name  # of a reward term
    return name in METRIC_NAMES or (name.startswith(METRIC_GROUPS) and not is_duration)


def _differences(what: str, values: Mapping[Any, Any], others: Mapping[Any, Any]) -> list[str]:
    """Return a line per value that is missing, unexpected or different; beyond `MAX_SHOWN` only their number."""
    found = [f"{what} {key}: missing" for key in values if key not in others]
    found += [f"{what} {key}: not in the undisturbed run" for key in others if key not in values]
    found += [
        f"{what} {key}: differs" for key in values if key in others and not is_bitwise_equal(values[key], others[key])
    ]
    more = [f"{what}: {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
    return found[:MAX_SHOWN] + more
