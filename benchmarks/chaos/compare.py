"""Whether two runs are the same run, to the last bit of what they have trained.

weights, optimizer    every tensor and every other value of the last checkpoints: weights, masters, both moments,
                      step counts, learning rate, random states; the controller's state but its times
model                 bytes of the exported safetensors files
prompts               prompt ids of each step, in order
trajectories          every column of each step's rollouts: tokens, log-probabilities, rewards, advantages, versions
metrics               of each step, logged once: all but times and sizes
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.chaos.read import Rollouts, Step, read_last_checkpoint, read_metrics, read_model, read_rollouts
from benchmarks.chaos.watch import Line
from megarl.errors import DataError

COMPARED = ("checkpoint", "model", "prompts", "trajectories", "metrics")

METRIC_NAMES = ("loss", "grad_norm", "learning_rate", "entropy")
METRIC_GROUPS = ("reward/", "response/", "advantage/", "policy/", "policy_version/", "train_infer_mismatch/", "kl/")
"""What follows from the training alone."""

SHOWN = 5
"""Differences of a kind that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of a disturbed run with an undisturbed one."""

    bitwise_equal: bool
    prompts_lost: int
    """That the undisturbed run has trained on, and the other has not; a prompt counts as often as it is drawn."""
    prompts_repeated: int
    """The other way round."""
    trajectories_repeated: int
    """The same sample of the same prompt in the same step, trained on or logged again."""
    differences: list[str]
    """Some of each kind, for people."""


def require_whole(run: Path) -> None:
    """Return if the undisturbed run has all that is compared.

    Raises:
        DataError: it lacks something.
    """
    for what, values in _parts(run).items():
        if not values:
            raise DataError(f"{run} needs what is compared, has nothing of it: {what}")


def compare(undisturbed: Path, disturbed: Path) -> Comparison:
    """Both are run folders; see the module for what is compared. What the disturbed run lacks is a difference."""
    parts, of_other = _parts(undisturbed), _parts(disturbed)
    differences = [line for what, values in parts.items() for line in _differences(what, values, of_other[what])]
    rollouts, others = read_rollouts(undisturbed), read_rollouts(disturbed)
    drawn, other_drawn = _drawn(rollouts), _drawn(others)
    return Comparison(
        bitwise_equal=not differences,
        prompts_lost=(drawn - other_drawn).total(),
        prompts_repeated=(other_drawn - drawn).total(),
        trajectories_repeated=_repeated(rollouts, others, read_metrics(disturbed)),
        differences=differences,
    )


def _parts(run: Path) -> dict[str, Mapping[Any, Any]]:
    """Everything that is compared, by what it is and within that by name or step."""
    rollouts = read_rollouts(run)
    return {
        "checkpoint": read_last_checkpoint(run),
        "model": read_model(run / "model"),
        "prompts of step": rollouts.stream,
        "trajectories of step": rollouts.rows,
        "metrics of step": _trained(read_metrics(run)),
    }


def _drawn(rollouts: Rollouts) -> Counter[str]:
    return Counter(prompt for stream in rollouts.stream.values() for prompt in stream)


def _repeated(rollouts: Rollouts, others: Rollouts, lines: Mapping[Step, list[Line]]) -> int:
    """By step the larger of two counts: samples written more than once, and those of a step that was logged again."""
    written, trained = Counter[Step](), Counter[Step]()
    for (step, _), count in (others.samples - rollouts.samples).items():
        written[step] += count
    for (step, _), count in rollouts.samples.items():
        trained[step] += count * (len(lines.get(step, ())) - 1)
    return sum(max(written[step], trained[step]) for step in {*written, *trained})


def _trained(lines: Mapping[Step, list[Line]]) -> dict[Step, list[dict[str, float | None]]]:
    return {step: [{k: v for k, v in line.items() if _is_trained(k)} for line in of] for step, of in lines.items()}


def _is_trained(name: str) -> bool:
    return name in METRIC_NAMES or name.startswith(METRIC_GROUPS)


def _differences(what: str, values: Mapping[Any, Any], others: Mapping[Any, Any]) -> list[str]:
    """A line for each that is in one alone, or not the same in both; what is too many is counted."""
    found = [f"{what} {key}: missing" for key in values if key not in others]
    found += [f"{what} {key}: not in the undisturbed run" for key in others if key not in values]
    found += [f"{what} {key}: differs" for key in values if key in others and not same(values[key], others[key])]
    more = [f"{what}: {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return found[:SHOWN] + more


def same(value: Any, other: Any) -> bool:
    """True where every bit is."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(_bytes(value), _bytes(other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return list(value) == list(other) and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and pickle.dumps(value) == pickle.dumps(other)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
