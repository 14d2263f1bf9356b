"""Metrics of a batch that was sampled: rewards, lengths, episodes, sources."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

from megarl.batch.trajectory import TRUNCATED_REASONS
from megarl.rollout.rollout_worker import GroupSummary
from megarl.run.kept_completions import KeptCompletions
from megarl.run.rollout_batch import RolloutBatch

ENDINGS = ("stop", *TRUNCATED_REASONS)
"""Endings of episodes whose number is logged even if it is 0."""


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the metrics of a batch: means over its completions. A batch without completions has no means."""
    groups, kept, rewards = batch.groups, batch.kept, batch.rewards
    num = len(kept)
    seconds = [group.summary.generation_seconds for group in batch.all_groups]
    metrics: dict[str, float] = {
        "rollout/generation_seconds_mean": sum(seconds) / len(seconds),
        "rollout/generation_seconds_max": max(seconds),
        "rollout/scoring_seconds_max": max(group.summary.scoring_seconds for group in batch.all_groups),
        **_retry_metrics(batch),
    }
    if not num:
        return metrics
    reasons = Counter(kept.column("finish_reason"))
    rewards_by_group = [set(rewards[first:stop]) for first, stop in pairwise([*batch.group_offsets, num])]
    metrics |= {
        "reward/mean": sum(rewards) / num,
        "reward/informative_groups": sum(len(distinct) > 1 for distinct in rewards_by_group) / len(groups),
        "response/length": sum(kept.response_lengths) / num,
        "response/truncated": sum(reasons[reason] for reason in TRUNCATED_REASONS) / num,
        "policy_version/min": min([tokens[0][0] if tokens else -1 for tokens in kept.column("tokens_by_version")]),
    }
    terms = kept.column("rewards")
    for name in dict.fromkeys(chain.from_iterable(terms)):
        values = [of_one[name] for of_one in terms if name in of_one]  # a function may leave sub-metrics out
        metrics[f"reward/{name}"] = sum(values) / len(values)
    metrics |= _source_metrics(batch)
    if (advantages := batch.scalars.get("advantages")) is not None:
        metrics["advantage/abs_mean"] = sum(map(abs, advantages)) / num
    return metrics | _episode_metrics(kept, reasons)


def _retry_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the numbers of requests of lost engines and of tokens that they continued from; none without losses."""
    summaries = [group.summary for group in batch.all_groups]
    num_retried = sum(summary.num_retried for summary in summaries)
    if not num_retried:
        return {}
    return {
        "rollout/retried_requests": float(num_retried),
        "rollout/kept_tokens": float(sum(summary.num_kept_tokens for summary in summaries)),
    }


def _episode_metrics(kept: KeptCompletions, endings: Counter[str]) -> dict[str, float]:
    """Return turns, forked segments and endings of episodes; none if all of them are single completions."""
    turns = kept.column("num_turns")
    if max(turns) <= 1 and endings.keys() <= {"stop", "length"}:
        return {}
    return {
        "rollout/turns": sum(turns) / len(turns),
        "rollout/forked_segments": float(kept.num_segments.sum() - len(kept)),
        **{f"rollout/ended_{reason}": float(endings[reason]) for reason in dict.fromkeys((*ENDINGS, *endings))},
    }


def _source_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return the metrics of each source of a mixture; none in a run with one data file."""
    by_source: dict[str, list[GroupSummary]] = {}
    for group in batch.groups:
        by_source.setdefault(group.summary.source, []).append(group.summary)
    metrics: dict[str, float] = {}
    for source, groups in by_source.items():
        if not source:
            continue
        own = [group.trajectories[i] for group in groups for i in group.kept]
        metrics |= {
            f"source/{source}/groups": float(len(groups)),
            f"source/{source}/reward": sum(t.reward for t in own) / len(own),
            f"source/{source}/length": sum(t.response_length for t in own) / len(own),
            f"source/{source}/truncated": sum(t.finish_reason in TRUNCATED_REASONS for t in own) / len(own),
        }
    return metrics
