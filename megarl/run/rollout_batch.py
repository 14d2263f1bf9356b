"""The controller's view of a step's completions: scalars, and references to tokens that stay in the workers.

Shapes: N completions of all groups, numbered group after group; S sequences that they consist of: a completion is an
episode, of one sequence unless its segments were forked. Dropped completions, whose reward could not be computed, are
not among them: they are left out here, before anything is estimated, logged or trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.pack import EPISODE_TOKENS, ColumnName, SampleKey, SampleTable
from megarl.batch.trajectory import TRUNCATED_REASONS, Trajectory
from megarl.cluster.workers.dispatch import Payload, StoredItem
from megarl.config import RunConfig
from megarl.functional import Denominators
from megarl.losses import AnyLoss
from megarl.megatron.requests import ForwardRequest, MiniBatch, TokenColumn, TrainRequest, VersionRange
from megarl.rollout.rollout_worker import SUMMARY_POSITIONS, GroupSummary, TrajectorySummary
from megarl.run.remote.rollout_group import FinishedGroup, groups_per_object


class KeptCompletions:
    """The N kept completions of some groups, numbered once, in columns that are computed when they are first read.

    Metrics, estimates and training requests each ask for them several times in a step; with 100,000 completions,
    numbering them again for each question would be most of the controller's work.
    """

    def __init__(self, groups: Sequence[FinishedGroup]) -> None:
        self.groups = groups
        self._kept = [group.summary.kept for group in groups]
        """Indices of the kept completions of each group."""
        self._columns: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        """Return the number of completions, N."""
        return sum(self._sizes)

    def column(self, name: str) -> list[Any]:
        """Return a field of the summaries of the N completions."""
        if name not in self._columns:
            of_groups: Sequence[tuple[Any, ...]] = self._column_of_groups(name)
            if not self.is_complete:
                of_groups = [tuple([of[i] for i in kept]) for of, kept in zip(of_groups, self._kept, strict=True)]
            self._columns[name] = list(chain.from_iterable(of_groups))
        return self._columns[name]

    @cached_property
    def summaries(self) -> list[TrajectorySummary]:
        """Summaries of the N completions, as objects; `column` reads one field of all."""
        return [
            group.summary.trajectories[i] for group, kept in zip(self.groups, self._kept, strict=True) for i in kept
        ]

    def _column_of_groups(self, name: str) -> Sequence[tuple[Any, ...]]:
        """Return a field of the summaries of each group's episodes, dropped ones included."""
        return self._columns_of_groups[SUMMARY_POSITIONS[name]] if self.groups else ()

    @cached_property
    def _columns_of_groups(self) -> Sequence[Sequence[tuple[Any, ...]]]:
        """By field of the summaries, its values in each group."""
        return list(zip(*[group.summary.columns for group in self.groups], strict=True))

    @cached_property
    def keys(self) -> list[SampleKey]:
        """N keys: (index of the group, index of the completion within the group)."""
        return [(p, i) for p, kept in enumerate(self._kept) for i in kept]

    @cached_property
    def group_numbers(self) -> NDArray[np.int64]:
        """Index of the group of each completion, [N]."""
        return np.repeat(np.arange(len(self._kept)), self._sizes)

    @cached_property
    def group_ids(self) -> list[int]:
        """`group_numbers` as a list."""
        ids: list[int] = self.group_numbers.tolist()
        return ids

    @property
    def group_offsets(self) -> list[int]:
        """Index of the first completion of each group."""
        return [0, *accumulate(self._sizes)][:-1]

    @cached_property
    def num_segments(self) -> NDArray[np.int64]:
        """Number of sequences of each completion, [N]."""
        if not self.is_forked:
            return np.ones(len(self), np.int64)
        return np.array([len(tokens) or 1 for tokens in self.column("segment_tokens")], np.int64)

    @cached_property
    def sequence_offsets(self) -> NDArray[np.int64]:
        """Number of sequences before each completion, and that of all, [N + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.num_segments)])

    @cached_property
    def sequence_keys(self) -> NDArray[np.int64]:
        """Key of each sequence, index of the group and index within the group's payload, [S, 2]."""
        if not self.is_forked:
            index_N = np.fromiter(chain.from_iterable(self._kept), np.int64, len(self))
            return np.stack([self.group_numbers, index_N], axis=1)
        keys: list[SampleKey] = []
        for p, (group, kept) in enumerate(zip(self.groups, self._kept, strict=True)):
            first = [0, *accumulate(len(tokens) or 1 for tokens in group.summary.column("segment_tokens"))]
            keys += [(p, s) for i in kept for s in range(first[i], first[i + 1])]
        return np.array(keys, np.int64).reshape(-1, 2)

    @cached_property
    def sequence_tokens(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, [S]."""
        num_tokens = self.column("num_tokens")
        if not self.is_forked:
            return np.array(num_tokens, np.int64)
        of_segments = zip(self.column("segment_tokens"), num_tokens, strict=True)
        return np.array([n for tokens, total in of_segments for n in tokens or (total,)], np.int64)

    @cached_property
    def segment_keys(self) -> list[list[SampleKey]]:
        """Keys of the sequences of each of the N completions."""
        keys, offsets = list(map(tuple, self.sequence_keys.tolist())), self.sequence_offsets.tolist()
        return [keys[offsets[n] : offsets[n + 1]] for n in range(len(self))]

    @cached_property
    def response_lengths(self) -> list[int]:
        """Numbers of sampled tokens of the N completions."""
        return self.column("response_length")

    @cached_property
    def rewards(self) -> list[float]:
        """Total rewards of the N completions."""
        return self.column("reward")

    @cached_property
    def _sizes(self) -> list[int]:
        return list(map(len, self._kept))

    @cached_property
    def is_complete(self) -> bool:
        """Whether all episodes of the groups are kept."""
        sizes = [len(group.summary.trajectories) for group in self.groups]
        return sizes == self._sizes

    @cached_property
    def is_forked(self) -> bool:
        """Whether an episode of the groups, also a dropped one, has several segments."""
        return any(map(any, self._column_of_groups("segment_tokens")))


@dataclass(frozen=True, slots=True)
class BatchVersions:
    """Versions of the policy in a batch, as the engines label their tokens."""

    current: int
    """The version that the trainer holds before the update."""
    oldest: int
    """Tokens of older versions are not trained on."""
    in_place: bool = False
    """Whether a token after a push within its request was sampled with the KV cache of older weights."""


@dataclass(slots=True, kw_only=True)
class RolloutBatch:
    """Completions of one step with rewards, log-probs, values and advantages, which the loop adds step by step.

    Examples:
            batch = run.sample(prompts)
            run.add_metrics({"reward/best": max(batch.rewards)})
            batch.scalars["positive"] = [float(reward > 0) for reward in batch.rewards]  # for the estimator
    """

    groups: list[FinishedGroup]
    """Groups with at least one completion that is not dropped."""
    dropped_groups: list[FinishedGroup] = field(default_factory=list)
    """Further groups of the step, none of whose completions is trained on."""
    scalars: dict[ColumnName, list[float]] = field(default_factory=dict)
    """Per completion: N numbers each."""
    columns: dict[ColumnName, Payload[TokenColumn]] = field(default_factory=dict)
    """Per token: references to arrays in the object store."""
    routes: Payload[TokenColumn] | None = None
    """References to the routes that the pass for `old_logprobs` has recorded; None: it has not."""
    sample_indices: list[int] | None = None
    """Completions to train on, possibly repeated; None: each completion once."""
    versions: BatchVersions | None = None
    """Set if the batch may have tokens of older policies."""
    _numbered: KeptCompletions | None = field(default=None, init=False, repr=False, compare=False)
    """The completions of `groups`, if they were needed since these were set."""

    @classmethod
    def from_sampled(cls, groups: Sequence[FinishedGroup], *, min_completions: int = 1) -> RolloutBatch:
        """Return the batch of these groups, without dropped completions.

        Args:
            groups: as sampled.
            min_completions: a group with fewer completions left is dropped too. 2 for a baseline from the group: a
                completion without others to compare with has none.
        """
        is_kept = [len(group.summary.kept) >= min_completions for group in groups]
        return cls(
            groups=[group for group, keep in zip(groups, is_kept, strict=True) if keep],
            dropped_groups=[group for group, keep in zip(groups, is_kept, strict=True) if not keep],
        )

    @property
    def all_groups(self) -> list[FinishedGroup]:
        """All groups of the step, dropped ones at the end."""
        return [*self.groups, *self.dropped_groups]

    @property
    def kept(self) -> KeptCompletions:
        """The N completions in columns."""
        if self._numbered is None or self._numbered.groups is not self.groups:
            self._numbered = KeptCompletions(self.groups)
        return self._numbered

    @property
    def summaries(self) -> list[TrajectorySummary]:
        """N trajectory summaries: rewards, lengths and other scalars. `kept.column` reads one of these of all."""
        return self.kept.summaries

    @property
    def rewards(self) -> list[float]:
        """N total rewards: weighted sums of the reward terms."""
        return self.kept.rewards

    @property
    def mean_reward(self) -> dict[str, float]:
        """The metric `reward/mean`, which a batch without completions lacks."""
        return {"reward/mean": sum(self.rewards) / len(self.rewards)} if self.rewards else {}

    def reward_term(self, name: str) -> list[float]:
        """Return the N values of one reward term."""
        return [rewards[name] for rewards in self.kept.column("rewards")]

    @property
    def group_ids(self) -> list[int]:
        """N group indices, from 0."""
        return self.kept.group_ids

    @property
    def group_offsets(self) -> list[int]:
        """Index of the first completion of each group."""
        return self.kept.group_offsets

    @property
    def keys(self) -> list[SampleKey]:
        """N keys of completions: (index of the group, index of the completion within the group)."""
        return self.kept.keys

    @property
    def segment_keys(self) -> list[list[SampleKey]]:
        """Keys of the sequences of each of the N completions: (index of the group, index within its payload)."""
        return self.kept.segment_keys

    @property
    def logged_advantages(self) -> list[float | None]:
        """Advantage of each sequence of `all_groups`; None for dropped ones, 0 if none was estimated."""
        logged: list[float | None] = []
        advantages = self.scalars.get("advantages", [0.0] * len(self.kept))
        if self.kept.is_complete and not self.kept.is_forked:
            logged += advantages
        else:
            estimated = iter(advantages)
            for group in self.groups:
                kept = set(group.summary.kept)
                for i, tokens in enumerate(group.summary.column("segment_tokens")):
                    logged += [next(estimated) if i in kept else None] * (len(tokens) or 1)
        num_dropped = sum(
            len(tokens) or 1 for group in self.dropped_groups for tokens in group.summary.column("segment_tokens")
        )
        return [*logged, *[None] * num_dropped]

    @property
    def num_dropped(self) -> int:
        """Number of sampled completions that are not in the batch."""
        return sum(len(group.summary.trajectories) for group in self.all_groups) - len(self.kept)

    def fetch_sampled_tokens(self) -> list[NDArray[np.int32]]:
        """Fetch N arrays: the token ids that the policy has sampled in each completion, from all of its segments.

        For loops that read completions, such as to make the next prompts of them; the others leave tokens where they
        are.
        """
        sampled: list[NDArray[np.int32]] = []
        for group, own_keys in groupby(self.segment_keys, key=lambda keys: keys[0][0]):
            trajectories = self.groups[group].payload.fetch()
            for keys in own_keys:
                segments = [trajectories[s] for _, s in keys]
                sampled.append(np.concatenate([t.token_ids[t.loss_mask] for t in segments]))
        return sampled

    def drop_groups(self, dropped: Sequence[FinishedGroup]) -> None:
        """Move these groups to the dropped ones; call it before adding scalars or columns."""
        assert not self.scalars, "they are numbered by completion"
        assert not self.columns, "they are numbered by completion"
        self.dropped_groups += dropped
        ids = set(map(id, dropped))
        self.groups = [group for group in self.groups if id(group) not in ids]

    def without_truncated(self) -> RolloutBatch:
        """Return a copy that does not train on completions that were truncated at a limit.

        They stay part of the batch, of its rewards and its metrics.
        """
        reasons = self.kept.column("finish_reason")
        trained = range(len(reasons)) if self.sample_indices is None else self.sample_indices
        return replace(self, sample_indices=[n for n in trained if reasons[n] not in TRUNCATED_REASONS])

    def add_terms(self, values: Mapping[str, Sequence[float]]) -> None:
        """Add reward terms of N values each; the total rewards stay as they are."""
        terms = self.kept.column("rewards")
        for name, values_N in values.items():
            terms = [{**of_one, name: value} for of_one, value in zip(terms, values_N, strict=True)]
        self._replace_column("rewards", terms)

    def add_to_rewards(self, name: str, values: Sequence[float]) -> None:
        """Add a reward term of N values, and add it to the total rewards with weight 1."""
        self.add_terms({name: values})
        self._replace_column("reward", [reward + value for reward, value in zip(self.rewards, values, strict=True)])

    def _replace_column(self, name: str, values: Sequence[object]) -> None:
        """Replace a field in the summaries of the N completions."""
        groups: list[FinishedGroup] = []
        values_N = iter(values)
        for group in self.groups:
            column = list(group.summary.column(name))
            for i in group.summary.kept:
                column[i] = next(values_N)
            groups.append(replace(group, summary=group.summary.with_columns(**{name: column})))
        self.groups = groups

    def forward_request(self, config: RunConfig) -> ForwardRequest:
        """Return a forward request (log-probs, values, scores) over all completions."""
        return ForwardRequest(
            samples=self._table({}),
            payloads=self._payloads,
            payload_blocks=self._payload_blocks(config),
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        )

    def train_request(
        self, config: RunConfig, loss: AnyLoss, names: Mapping[ColumnName, ColumnName] | None = None
    ) -> TrainRequest:
        """Return a training request over `sample_indices`, split into `num_mini_batches` of complete groups.

        Args:
            loss: its columns are taken from this batch's per-token columns, else from its per-completion scalars.
            names: column of the loss -> its name in this batch, where they differ.

        Raises:
            ValueError: the batch lacks a column of the loss other than `old_logprobs`, which the trainer computes.
        """
        columns = self._columns_of(loss, names or {})
        algorithm, groups_N = config.algorithm, self.kept.group_numbers
        order_N = np.arange(len(groups_N)) if self.sample_indices is None else np.array(self.sample_indices, np.int64)
        order_N = order_N[np.argsort(groups_N[order_N], kind="stable")]  # group after group
        lengths_N = self._num_tokens(None if self.versions is None else self.versions.oldest)
        table = self._table(columns, lengths_N)
        positive_N = np.array(self.scalars.get("positive", [0.0] * len(groups_N))) != 0
        num = algorithm.num_mini_batches
        starts = np.searchsorted(groups_N[order_N], [round(i * len(self.groups) / num) for i in range(num + 1)])
        mini_batches = []
        for start, stop in pairwise(starts.tolist()):
            indices = order_N[start:stop]
            if not len(indices):
                continue
            mini_batches.append(
                MiniBatch(
                    samples=table.take(self._sequences_of(indices)),
                    # at least 1: a mini-batch without sampled tokens has loss 0, not 0 / 0
                    denominators=Denominators(
                        num_tokens=max(1, int(lengths_N[indices].sum())),
                        num_sequences=len(indices),
                        num_positive_tokens=int(lengths_N[indices][positive_N[indices]].sum()),
                    ),
                )
            )
        return TrainRequest(
            mini_batches=tuple(mini_batches),
            payloads=self._payloads,
            payload_blocks=self._payload_blocks(config),
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
            loss=loss,
            columns={name: self.columns[own_name] for name, own_name in columns.items() if own_name in self.columns},
            epochs=algorithm.ppo_epochs,
            versions=self._version_range(order_N),
        )

    @property
    def mixed_kv_share(self) -> float:
        """Share of the sampled tokens after a push within their request; 0 without tokens."""
        return int(self._count_since("mixed_by_version", 0).sum()) / max(1, sum(self.kept.response_lengths))

    def _num_tokens(self, oldest: int | None) -> NDArray[np.int64]:
        """Return the number of sampled tokens of each completion, [N]; of versions from `oldest` on, if given."""
        if oldest is None:
            return np.array(self.kept.response_lengths, np.int64)
        return self._count_since("tokens_by_version", oldest)

    def _count_since(self, column: str, version: int) -> NDArray[np.int64]:
        """Return the number of tokens of each completion, of this column of versions, by this version or later, [N]."""
        counts = [sum([num for by, num in of_one if by >= version]) for of_one in self.kept.column(column)]
        return np.array(counts, np.int64)

    def _version_range(self, order_N: NDArray[np.int64]) -> VersionRange | None:
        if self.versions is None:
            return None
        current, oldest = self.versions.current, self.versions.oldest
        since, in_place = max(current, oldest), self.versions.in_place
        num_current = int(self._num_tokens(since)[order_N].sum())
        if in_place:
            num_current -= int(self._count_since("mixed_by_version", since)[order_N].sum())
        return VersionRange(current=current, oldest=oldest, num_current_tokens=num_current, in_place=in_place)

    def _columns_of(self, loss: AnyLoss, names: Mapping[ColumnName, ColumnName]) -> dict[ColumnName, ColumnName]:
        """Return column of the loss -> column or scalar of this batch."""
        available = self.columns.keys() | self.scalars.keys()
        columns = {name: names.get(name, name) for name in loss.columns}
        if "old_logprobs" not in available:
            columns.pop("old_logprobs", None)
        for own_name in columns.values():
            if own_name not in available:
                raise ValueError(
                    f"{type(loss).__name__} reads the column {own_name!r}, which the batch lacks; it has "
                    f"{', '.join(sorted(available)) or 'none'}"
                )
        return columns

    @property
    def _payloads(self) -> tuple[StoredItem[Sequence[Trajectory]], ...]:
        return tuple(group.payload for group in self.groups)

    def _payload_blocks(self, config: RunConfig) -> tuple[int, ...]:
        """Return the block of each group: those that were sent to a worker together, if it had enough."""
        per_object = groups_per_object(config)
        return tuple([group.summary.group_id // per_object for group in self.groups])

    def _table(
        self, columns: Mapping[ColumnName, ColumnName], episode_tokens_N: NDArray[np.int64] | None = None
    ) -> SampleTable:
        """Return all S sequences, with those columns of the loss that have one value per completion.

        Args:
            episode_tokens_N: number of trained tokens of each completion. It becomes the column `EPISODE_TOKENS` if a
                completion has several sequences: a mean over its tokens is one over those of all of them.
        """
        kept = self.kept
        scalars = {
            name: np.array(self.scalars[own_name], np.float64)
            for name, own_name in columns.items()
            if own_name in self.scalars and own_name not in self.columns
        }
        if episode_tokens_N is not None and bool((kept.num_segments > 1).any()):
            scalars[EPISODE_TOKENS] = episode_tokens_N.astype(np.float64)
        return SampleTable(
            kept.sequence_keys,
            kept.sequence_tokens,
            {name: np.repeat(values_N, kept.num_segments) for name, values_N in scalars.items()},
        )

    def _sequences_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, of S, of the sequences of these completions."""
        offsets = self.kept.sequence_offsets
        if offsets[-1] == len(offsets) - 1:
            return indices
        return np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in indices.tolist()])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """What was sampled for a step that trains on some groups only."""

    batch: RolloutBatch
    """The groups that are trained on."""
    sampled: Sequence[RolloutBatch]
    """All groups that were sampled, dropped ones included; more may be kept than are trained on."""
    num_batches: float
    """Number of batches that were sampled."""

    @property
    def groups(self) -> list[FinishedGroup]:
        """All groups that were sampled, without dropped ones."""
        return [group for batch in self.sampled for group in batch.groups]


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
        **batch.mean_reward,
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
