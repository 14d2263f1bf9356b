"""Samples, filters and scores the batch of an RL step, and evaluates on held-out prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import comb, fsum
from pathlib import Path
from typing import Any

from megarl.batch.trajectory import Prompt
from megarl.checkpoint.run_lock import require_lock
from megarl.config import RunConfig
from megarl.config.data import DifficultyConfig
from megarl.engines.engine import Sampling
from megarl.errors import ConfigError, DataError, RewardError
from megarl.rollout.journal import journal_folder, list_steps, remove_steps_from
from megarl.run.remote.rollout_group import FinishedGroup, RolloutGroup
from megarl.run.reward_weights import RewardFailures, RewardWeights
from megarl.run.rollout_batch import BatchVersions, KeptSample, RolloutBatch
from megarl.run.run_logs import ScheduleLog, log_folder, open_schedule, replay_schedule
from megarl.run.run_parts import RunParts
from megarl.run.run_state import RunState
from megarl.run.schedule.events import ScheduleState
from megarl.run.schedule.settings import Update
from megarl.run.scheduled_groups import GroupJobs, Keep, ScheduledGroups
from megarl.run.stage_run import SAMPLER_NAME, StageRun
from megarl.run.sync.weight_sync import WeightSync
from megarl.tracking.timing import Startup


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


@dataclass(slots=True)
class SolvedRows:
    """State of a run that belongs to its checkpoints."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    """Prompt id -> number of groups, without interruption until the last one, whose completions have all passed."""


class DifficultyGate:
    """Applies `data.difficulty`. The pass rate of a group is the share of its completions that pass."""

    def __init__(self, config: DifficultyConfig, term: str) -> None:
        """`term`: name of the reward term, where the configuration names none."""
        self._config, self._term = config, config.term or term
        self.max_batches = config.max_batches
        self.solved = SolvedRows()

    def keep(self, group: FinishedGroup) -> bool:
        """Return whether to train on the group; True for one of a source without the term."""
        rate = self.pass_rate(group)
        return rate is None or self._config.min_pass_rate <= rate <= self._config.max_pass_rate

    def pass_rate(self, group: FinishedGroup) -> float | None:
        """Return the pass rate of a group; None if its source is not scored by the term."""
        kept = [group.summary.trajectories[i] for i in group.summary.kept]
        values = [t.rewards[self._term] for t in kept if self._term in t.rewards]
        return sum(value >= self._config.pass_reward for value in values) / len(values) if values else None

    def record(self, groups: Iterable[FinishedGroup]) -> None:
        """Count the groups whose completions have all passed."""
        for group in groups:
            name, rate = group.summary.prompt_id, self.pass_rate(group)
            if rate == 1:
                self.solved.in_a_row[name] = self.solved.in_a_row.get(name, 0) + 1
            elif rate is not None:
                self.solved.in_a_row.pop(name, None)

    def is_retired(self, prompt: Prompt) -> bool:
        """Return whether the prompt is not sampled any more."""
        limit = self._config.retire_after
        return limit is not None and self.solved.in_a_row.get(prompt.prompt_id, 0) >= limit

    @property
    def num_retired(self) -> int:
        """Number of prompts that are not sampled any more."""
        limit = self._config.retire_after
        return 0 if limit is None else sum(num >= limit for num in self.solved.in_a_row.values())

    def metrics(self, groups: Iterable[FinishedGroup]) -> dict[str, float]:
        """Return the mean pass rate of sampled groups, the share that is kept, and the number of retired prompts."""
        groups = list(groups)
        rates = [rate for group in groups if (rate := self.pass_rate(group)) is not None]
        metrics = {"difficulty/retired": float(self.num_retired)} if self._config.retire_after is not None else {}
        if rates:
            metrics["difficulty/pass_rate"] = sum(rates) / len(rates)
            metrics["difficulty/kept"] = sum(map(self.keep, groups)) / len(groups)
        return metrics


DEFAULT_MAX_BATCHES = 10
"""Number of batches that a step of a schedule samples at most to replace groups that are not kept."""


class GroupSampler:
    """Makes the batches that an RL run trains on, and evaluates on held-out prompts."""

    def __init__(self, config: RunConfig, stage: StageRun, parts: RunParts, sync: WeightSync, startup: Startup) -> None:
        """`stage`: the run, for its step, phases, log and order of prompts."""
        self._config, self._stage, self._sync = config, stage, sync
        self._rollout, self._scorers, self._replay_until = parts.rollout, parts.models.scorers, parts.replay_until
        self._prompts, self._held_out = parts.prompts.training, parts.prompts.held_out
        s = config.rollout.sampling
        self._sampling = Sampling(
            temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_new_tokens=config.rollout.max_new_tokens
        )
        self._startup, self._is_startup_reported = startup, parts.resumed is not None
        self._resumed = parts.resumed or RunState()
        self._last_journaled = 0 if parts.resumed is None else max(list_steps(config.run_dir), default=0)
        """Last step of which the run has sampled groups before it was resumed."""
        difficulty = config.data.difficulty
        self.gate = None if difficulty is None else DifficultyGate(difficulty, config.reward.eval_name)
        num_completions = config.algorithm.prompts_per_step * config.algorithm.group_size
        self._failures = RewardFailures(config.reward, num_completions, stage.notify)
        writes = self._replay_until is None
        self.weights = RewardWeights(config, self._resumed.reward_weights, writes=writes)
        """Weights of the reward terms by step."""
        self.scheduled: ScheduledGroups | None = None
        """The groups of a schedule other than `sync`, once the first step has begun."""
        self._announced: list[Prompt] = []
        """What `step_prompts` has returned last to the loop of a schedule."""
        self._first_row = 0
        """Position of the schedule's first group in the order of the prompts."""

    def begin_step(self) -> None:
        """Take the weights of the current step, which may have been changed since the step before."""
        before, step = dict(self.weights.current), self._stage.step
        changed = self.weights.begin_step(step)
        for name, weight in changed.items():
            self._stage.notify(
                f"step {step}: reward.terms.{name}.weight is {weight:g} from now on, was {before[name]:g}"
            )
        if changed and self.scheduled is not None:
            self.scheduled.forget_kept()

    def prompts(self) -> list[Prompt]:
        """Return the next prompts of the training data; as `RLRun.prompts`."""
        if self.scheduled is not None:
            raise self._other_prompts_error()
        wanted, num_drawn = self._config.algorithm.prompts_per_step, 0
        found: list[Prompt] = []
        while (missing := wanted - len(found)) > 0:
            drawn = [self._prompts[i] for i in self._stage.rows.take(missing)]
            num_drawn += len(drawn)
            found += [prompt for prompt in drawn if self.gate is None or not self.gate.is_retired(prompt)]
            if not found and num_drawn >= 2 * len(self._prompts):
                raise DataError(
                    f"data.difficulty.retire_after: no prompt is left to sample, all {len(self._prompts)} are retired"
                )
        return found

    def step_prompts(self) -> list[Prompt]:
        """Return the prompts of the next step; with a schedule, of the groups that were admitted since the last one."""
        if self._config.schedule.type == "sync":
            return self.prompts()
        if self.scheduled is None:
            self.scheduled = self._open_schedule()
        self._announced = self.scheduled.take_prompts()
        return self._announced

    def _other_prompts_error(self) -> ConfigError:
        schedule, algorithm = self._config.schedule.type, self._config.algorithm.type
        return ConfigError(
            f"schedule.type: {schedule} chooses the prompts of a step: {algorithm} needs to pass what steps() yields "
            "to sample, and a filter to sample_kept for further prompts"
        )

    def _open_schedule(self) -> ScheduledGroups:
        """Begin or resume to sample ahead; a replay repeats the logged batches."""
        jobs, begin = self._begin_schedule(), self._schedule_begin
        if self._replay_until is None:
            schedule, resumed = open_schedule(self._config, begin, jobs.job)
        else:
            schedule, resumed = replay_schedule(self._config, begin, last_step=self._replay_until), True
        return ScheduledGroups(
            schedule,
            self._rollout.open_stream(),
            ScheduleLog(log_folder(journal_folder(self._config.run_dir)) if self._replay_until is None else None),
            make_job=jobs.job,
            resumed=resumed,
            policy_version=self._sync.policy_version,
            phase=partial(self._stage.timer.phase, waiting=True),
        )

    @property
    def _schedule_begin(self) -> ScheduleState:
        """The state from which the schedule continues, before what is logged."""
        step = self._resumed.step
        begun = ScheduleState(version=step, next_ordinal=step * self._config.algorithm.prompts_per_step)
        return self._resumed.schedule or begun

    def _begin_schedule(self) -> GroupJobs:
        """Return the jobs of the schedule, whose next prompt is the next one of the data."""
        self._first_row = self._stage.rows.ordinal - self._schedule_begin.next_ordinal
        return GroupJobs(
            config=self._config,
            prompts=self._prompts,
            order=self._stage.rows.order,
            first=self._first_row,
            sampling=self._sampling,
        )

    def sample(self, prompts: Sequence[Prompt], *, attempt: int = 0, greedy: bool = False) -> RolloutBatch:
        """Sample a batch; as `RLRun.sample`."""
        if self.gate is None or greedy or attempt:
            return self._sample_batch(prompts, attempt=attempt, greedy=greedy)
        found = self.sample_kept(prompts, lambda _: True, max_batches=self.gate.max_batches)
        if found.batch.groups:
            return found.batch
        return RolloutBatch(groups=[], dropped_groups=found.sampled[-1].all_groups)

    def _sample_batch(self, prompts: Sequence[Prompt], *, attempt: int, greedy: bool = False) -> RolloutBatch:
        self.begin_sampling()
        if self.scheduled is not None:
            if prompts is not self._announced or attempt or greedy:
                raise self._other_prompts_error()
            return self._take_batch(self.scheduled, None, None)[0]
        label = f"step-{self._stage.step}" + (f"-{attempt}" if attempt else "") + ("-greedy" if greedy else "")
        with self._stage.phase("rollout"):
            groups = self._rollout.collect(
                prompts,
                num_samples=1 if greedy else self._config.algorithm.group_size,
                sampling=replace(self._sampling, temperature=0.0) if greedy else self._sampling,
                label=label,
                seed=(self._config.seed, self._stage.step, *([attempt] if attempt else [])),
            )
        if self._stage.step < self._last_journaled and not all(group.summary.replayed for group in groups):
            self._discard_later_groups()
        batch = self._make_batch(groups, min_completions=1 if greedy else self._min_completions)
        self._check_failures()
        return batch

    def _discard_later_groups(self) -> None:
        """Let later steps sample again: the journal has lost groups of this step, after which weights may be others."""
        require_lock(self._config.run_dir)
        self._stage.notify(
            f"step {self._stage.step}: the journal lacks groups of this step; those of later steps are sampled again"
        )
        remove_steps_from(self._config.run_dir, self._stage.step + 1)
        self._last_journaled = self._stage.step

    def sample_kept(self, prompts: Sequence[Prompt], keep: Keep, *, max_batches: int | None = None) -> KeptSample:
        """Sample until enough groups are kept; as `RLRun.sample_kept`."""
        num_groups, gate = self._config.algorithm.prompts_per_step, self.gate

        def is_kept(group: FinishedGroup) -> bool:
            return keep(group) and (gate is None or gate.keep(group))

        if self.scheduled is not None:
            if prompts is not self._announced:
                raise self._other_prompts_error()
            self.begin_sampling()
            max_removed = ((max_batches or DEFAULT_MAX_BATCHES) - 1) * num_groups
            batch, removed = self._take_batch(
                self.scheduled, lambda group: is_kept(self.weights.sum_up(group)), max_removed
            )
            num_batches = (len(batch.all_groups) + len(removed.all_groups)) / num_groups
            if gate is not None:
                self._stage.step_metrics |= gate.metrics([*batch.groups, *removed.groups])
            return KeptSample(batch=batch, sampled=[batch, removed], num_batches=num_batches)
        kept: list[FinishedGroup] = []
        sampled: list[RolloutBatch] = []
        for attempt in range(max_batches or 1):
            sampled.append(self._sample_batch(self.prompts() if attempt else prompts, attempt=attempt))
            kept += filter(is_kept, sampled[-1].groups)
            if gate is not None:
                gate.record(sampled[-1].groups)
            if len(kept) >= num_groups:
                break
        if gate is not None:
            self._stage.step_metrics |= gate.metrics(group for batch in sampled for group in batch.groups)
        return KeptSample(batch=RolloutBatch(groups=kept[:num_groups]), sampled=sampled, num_batches=len(sampled))

    def sample_with_baselines(self, prompts: Sequence[Prompt]) -> tuple[RolloutBatch, list[float]]:
        """Sample as `sample`, and a greedy completion of each prompt; as `RLRun.sample_with_baselines`."""
        if self.scheduled is not None:
            batch = self.sample(prompts)
            batch.drop_groups([group for group in batch.groups if group.summary.baseline is None])
            return batch, [group.summary.baseline or 0.0 for group in batch.groups]
        greedy = self.sample(prompts, greedy=True)
        batch = self.sample(prompts)
        rewards = {group.summary.group_id: reward for group, reward in zip(greedy.groups, greedy.rewards, strict=True)}
        batch.drop_groups([group for group in batch.groups if group.summary.group_id not in rewards])
        return batch, [rewards[group.summary.group_id] for group in batch.groups]

    def _take_batch(
        self, scheduled: ScheduledGroups, keep: Keep | None, max_removed: int | None
    ) -> tuple[RolloutBatch, RolloutBatch]:
        """Return the batch of this step, and the groups that were removed for it."""
        if max_removed is None:
            max_removed = self._config.algorithm.prompts_per_step
        with self._stage.phase("rollout"):
            taken = scheduled.next_batch(self._is_usable, keep, max_removed=max_removed)
        batch = self._make_batch(taken.groups, min_completions=self._min_completions)
        in_place = scheduled.schedule.policy.update is Update.IN_PLACE
        batch.versions = BatchVersions(
            current=self._sync.policy_version, oldest=scheduled.oldest_label(), in_place=in_place
        )
        tokens = Counter[int]()
        for of_completion in batch.kept.column("tokens_by_version"):
            tokens.update(dict(of_completion))
        self._stage.step_metrics |= scheduled.staleness(tokens).metrics() | scheduled.metrics()
        if in_place:
            self._stage.step_metrics["policy/mixed_kv"] = batch.mixed_kv_share
        removed = self._make_batch(taken.removed, min_completions=self._min_completions)
        self._check_failures()
        return batch, removed

    def _is_usable(self, group: FinishedGroup) -> bool:
        """Return whether rewards failed on so few completions of the group that it can be trained on."""
        summary = self.weights.sum_up(group).summary
        if self._config.algorithm.needs_greedy_baseline and summary.baseline is None:
            return False
        return len(summary.kept) >= self._min_completions

    @property
    def _min_completions(self) -> int:
        """Number of completions that a group needs."""
        return 2 if self._config.algorithm.needs_group else 1

    def _make_batch(self, groups: Sequence[FinishedGroup], *, min_completions: int) -> RolloutBatch:
        """Return the batch of sampled groups, with the rewards of models."""
        self._report_startup()
        summed = [self.weights.sum_up(group) for group in groups]
        batch = RolloutBatch.from_sampled(summed, min_completions=min_completions)
        if self._scorers and batch.groups:
            unscored = batch.groups
            batch.add_terms(self._score(batch))  # a cost is a term, and no part of the total
            scored = {id(before): group for before, group in zip(unscored, batch.groups, strict=True)}
            summed = [self.weights.sum_up(scored.get(id(group), group)) for group in summed]
            batch = RolloutBatch.from_sampled(summed, min_completions=min_completions)
        self._failures.add(summed)
        dropped = self._stage.step_metrics.get("reward/dropped", 0.0) + batch.num_dropped  # of all batches of the step
        self._stage.add_metrics({"reward/dropped": dropped, **self._failures.metrics()})
        return batch

    def _check_failures(self) -> None:
        """Check that rewards failed on few completions of the step.

        Raises:
            RewardError: they failed on more than `reward.max_failed_share`; a run that resumes samples them again.
        """
        try:
            self._failures.check(self._stage.step)
        except RewardError:
            self._discard_groups()
            raise

    def _discard_groups(self) -> None:
        """Let a run that resumes sample the groups of this step again, and those of later steps."""
        if self._replay_until is not None:
            return  # the journal is another run's
        require_lock(self._config.run_dir)
        if self.scheduled is None:
            remove_steps_from(self._config.run_dir, self._stage.step)
        else:
            self.scheduled.log_retreat()

    def clear_step(self) -> None:
        """Forget the metrics and failures of the step."""
        self._stage.step_metrics.clear()
        self._failures.begin_step()

    def _score(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Return the N values of each reward model, by name of its term."""
        request, values = batch.forward_request(self._config), dict[str, list[float]]()
        for name, scorer in self._scorers.items():
            self._sync.begin_scoring(name)
            with self._stage.phase("score"):
                scores = scorer.scores(request)
            values[name] = [scores[keys[-1]] for keys in batch.segment_keys]  # of the end of each episode
        return values

    def begin_sampling(self) -> None:
        """Free device memory for the engines and, if they have lost their weights, push them again."""
        self._stage.add_metrics(self._sync.begin_sampling())

    def evaluate(self) -> None:
        """Generate for the held-out prompts; log the mean of `reward.eval_term` as `eval/<term>`."""
        if not self._held_out:
            return
        with self._stage.phase("evaluate"):
            evaluation = evaluate(self._config, self._rollout, self._held_out, label=f"evaluate-{self._stage.step}")
        self._report_startup()
        term, num, step = self._config.reward.eval_name, len(self._held_out), self._stage.step
        dropped = {"eval/dropped": float(evaluation.num_dropped)} if evaluation.num_dropped else {}
        if dropped:
            self._stage.notify(
                f"step {step}: eval {term} failed on {evaluation.num_dropped} of {num * self._config.eval.samples} "
                "held-out completions, which do not count"
            )
        if evaluation.score is None:
            self._stage.log(dropped)
            return
        self._stage.totals.evaluations[step] = evaluation.score
        self._stage.log({**evaluation.metrics, **dropped})
        self._stage.notify(f"step {step}: eval {term} {evaluation.score:.3f} on {num} held-out prompts")

    def _report_startup(self) -> None:
        """After the first completions: write `startup.json` and report the startup time by phase. Runs once."""
        if self._is_startup_reported:
            return
        self._is_startup_reported = True
        report = self._startup.finish("first completion", self._rollout.first_completion_time())
        report.write(Path(self._config.run_dir) / "startup.json")
        self._stage.notify(report.line)

    def schedule_state(self) -> Mapping[str, Any]:
        """Return the fields of `RunState` that a schedule other than `sync` sets; none before its first step."""
        if self.scheduled is None:
            return {}
        state = self.scheduled.state()
        position = self._stage.rows.state_at(self._first_row + state.next_ordinal)
        return {"schedule": state, "samplers": {SAMPLER_NAME: position}}

    def probe(self, max_tokens: int) -> RolloutBatch:
        """Sample a short completion of each engine, of at most `max_tokens` tokens."""
        step, limit = self._stage.step, min(max_tokens, self._sampling.max_new_tokens)
        prompt, sampling = self._prompts[step % len(self._prompts)], replace(self._sampling, max_new_tokens=limit)
        seed = (self._config.seed, step)
        return RolloutBatch.from_sampled(
            self._rollout.sample_on_each_engine(prompt, sampling=sampling, label=f"probe-{step}", seed=seed)
        )
