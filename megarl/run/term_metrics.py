"""Metrics of each reward term in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.run.rollout_batch import RolloutBatch


def term_metrics(batch: RolloutBatch, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `reward/<term>/<key>` of a batch; a quantity that is not defined is left out.

    `weight`; `share`: sum of |weight * value| over the completions, as a share of that of all terms; `seconds_mean` and
    `seconds_max`: time that the term took for a group; `length_correlation`: Pearson correlation of the term's value
    and the number of sampled tokens.

    Args:
        weights: of the terms of the reward, in this step.
    """
    metrics = {f"reward/{name}/weight": weight for name, weight in weights.items()}
    seconds: dict[str, list[float]] = {}
    for group in batch.all_groups:
        for name, report in group.summary.terms.items():
            seconds.setdefault(name, []).append(report.seconds)
    for name, times in seconds.items():
        metrics[f"reward/{name}/seconds_mean"] = sum(times) / len(times)
        metrics[f"reward/{name}/seconds_max"] = max(times)
    found: dict[str, tuple[list[float], list[int]]] = {}
    """By term, its values and the numbers of sampled tokens of the completions whose source has the term."""
    terms, response_lengths = batch.kept.column("rewards"), batch.kept.response_lengths
    for name in weights:
        scored = [(of_one[name], n) for of_one, n in zip(terms, response_lengths, strict=True) if name in of_one]
        if scored:
            found[name] = [value for value, _ in scored], [n for _, n in scored]
    parts = {name: sum(abs(weights[name] * value) for value in values) for name, (values, _) in found.items()}
    total = sum(parts.values())
    for name, (values, lengths) in found.items():
        if total > 0:
            metrics[f"reward/{name}/share"] = parts[name] / total
        correlation = _correlation(values, lengths)
        if correlation is not None:
            metrics[f"reward/{name}/length_correlation"] = correlation
    return metrics


def _correlation(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the Pearson correlation, or None where one of the two is constant."""
    x, y = np.array(values, np.float64), np.array(others, np.float64)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
