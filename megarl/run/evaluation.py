"""Evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.groups.rollout_group import RolloutGroup
from megarl.rollout.engine import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation."""

    score: float | None
    """Mean of `reward.eval_term` over prompts and samples; None if it failed on all completions."""
    metrics: Mapping[str, float]
    """The same as `eval/<term>`, pass@k, and both for each source as `eval/<source>/<term>`."""
    num_dropped: int
    """Number of completions on which the term failed; they do not count."""


def evaluate(config: RunConfig, rollout: RolloutGroup, prompts: Sequence[Prompt], *, label: str) -> Evaluation:
    """Evaluate `reward.eval_term` on `eval.samples` completions of each prompt; a single one is greedy.

    A source that does not have the term is evaluated by the first of its own.
    """
    options, sampled = config.eval, config.rollout.sampling
    limit = config.rollout.max_new_tokens
    sampling = Sampling(temperature=0.0, max_new_tokens=limit)
    seed: tuple[int, ...] = ()
    if options.samples > 1:
        seed = (config.seed,)
        sampling = Sampling(
            temperature=sampled.temperature, top_p=sampled.top_p, top_k=sampled.top_k, max_new_tokens=limit
        )
    groups = rollout.collect(prompts, num_samples=options.samples, sampling=sampling, label=label, seed=seed)
    versions = {v for group in groups for t in group.summary.trajectories for v, _ in t.tokens_by_version}
    assert len(versions) <= 1, f"{label}: weights were pushed during the evaluation, versions {sorted(versions)}"
    values: dict[tuple[str, str], list[list[float]]] = {}
    num_dropped = 0
    for group in groups:
        prompt = prompts[group.summary.group_id]
        term = source_term(config, prompt)
        scored = [t.rewards[term] for t in group.summary.trajectories if term in t.rewards]
        num_dropped += len(group.summary.trajectories) - len(scored)
        values.setdefault((prompt.source, term), []).append(scored)
    metrics: dict[str, float] = {}
    for (source, term), by_prompt in values.items():
        if source:
            metrics |= _metrics(f"eval/{source}/{term}", by_prompt, config)
    of_all = [scored for by_prompt in values.values() for scored in by_prompt]
    metrics |= _metrics(f"eval/{config.reward.eval_name}", of_all, config)
    return Evaluation(score=_mean(of_all), metrics=metrics, num_dropped=num_dropped)


def source_term(config: RunConfig, prompt: Prompt) -> str:
    """Return the name of the term that evaluates completions of the prompt."""
    name, own = config.reward.eval_name, prompt.reward_terms
    return name if own is None or name in own else own[0]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k of the samples, drawn without replacement, has passed.

    The unbiased estimator of Chen et al., arXiv 2107.03374, section 2.1: 1 - C(n - c, k) / C(n, k).
    """
    assert 0 <= num_passed <= num_samples, f"{num_passed} of {num_samples} samples"
    assert 1 <= k <= num_samples, f"pass@{k} needs at least {k} samples, got {num_samples}"
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def _metrics(name: str, by_prompt: Sequence[Sequence[float]], config: RunConfig) -> dict[str, float]:
    """Return the mean of the term and pass@k, by metric name; prompts with fewer than k scored samples do not count."""
    mean = _mean(by_prompt)
    metrics = {} if mean is None else {name: mean}
    most = config.eval.samples
    for k in sorted({most, *(2**i for i in range(1, most.bit_length()))}) if most > 1 else ():
        passed = [
            pass_at_k(len(scored), sum(value >= config.eval.pass_reward for value in scored), k)
            for scored in by_prompt
            if len(scored) >= k
        ]
        if passed:
            metrics[f"{name}/pass@{k}"] = fsum(passed) / len(passed)
    return metrics


def _mean(by_prompt: Sequence[Sequence[float]]) -> float | None:
    values = [value for scored in by_prompt for value in scored]
    return sum(values) / len(values) if values else None
