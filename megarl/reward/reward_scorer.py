"""Computes the rewards of trajectories: the value of every reward term."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megarl.batch.trajectory import Prompt, ScoredGroup, TermReport, Trajectory
from megarl.config.reward import (
    AnyRuleConfig,
    CodeRewardConfig,
    EnvironmentRewardConfig,
    FormatRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    MathRewardConfig,
    ModelRewardConfig,
    NumericRewardConfig,
    PythonRewardConfig,
    RewardsConfig,
    RuleConfig,
)
from megarl.errors import RewardError
from megarl.reward.python_function import PythonTerm
from megarl.reward.terms import (
    Completion,
    EnvironmentTerm,
    FormatTerm,
    MathTerm,
    NumericTerm,
    Term,
    TermError,
    TermValue,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardScorer:
    """Scores trajectories by the rules and functions of `reward.terms`; reward models are evaluated elsewhere.

    Must be created in the process that uses it, because it loads the functions and the tokenizer.
    """

    def __init__(self, config: RewardsConfig, decode: Callable[[Sequence[int]], str]) -> None:
        """Create a scorer for the terms of `config`.

        Args:
            config: the terms.
            decode: turns sampled tokens into text without special tokens.

        Raises:
            ConfigError: a term is invalid; the message names its YAML path.
            RewardError: a class of the user cannot be created.
        """
        self._decode = decode
        self._rules = {name: term for name, term in config.terms.items() if not isinstance(term, ModelRewardConfig)}
        self._terms = {name: _make_term(name, term) for name, term in self._rules.items()}

    @classmethod
    def from_tokenizer(cls, config: RewardsConfig, tokenizer: PreTrainedTokenizerBase) -> RewardScorer:
        """Return a scorer that decodes with the tokenizer; raises as the constructor."""
        # cleaning up spaces would change the text of the policy, and with it the result of a strict rule
        return cls(config, partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    async def score(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> ScoredGroup:
        """Return the trajectories with their rewards, by the terms of the source of `prompt`, which all continue.

        A term that fails on a completion is called once more for it. If it fails again, the trajectory has
        `reward_errors`, unless the term has `on_error: raise`.

        Raises:
            RewardError: a term with `on_error: raise` failed twice, or a term cannot work at all.
        """
        completions = [Completion(t, self._decode(t.token_ids[t.loss_mask].tolist())) for t in trajectories]
        names = self._terms if prompt.reward_terms is None else prompt.reward_terms
        outcomes = await asyncio.gather(*(self._score_term(name, completions, prompt) for name in names))
        return ScoredGroup(
            trajectories=[
                _with_rewards(trajectory, {name: values[i] for name, (values, _) in zip(names, outcomes, strict=True)})
                for i, trajectory in enumerate(trajectories)
            ],
            terms={name: report for name, (_, report) in zip(names, outcomes, strict=True)},
        )

    async def close(self) -> None:
        """Call `close()` of the user's rewards; failures are logged as warnings."""
        await asyncio.gather(*(term.close() for term in self._terms.values()))

    async def _score_term(
        self, name: str, completions: Sequence[Completion], prompt: Prompt
    ) -> tuple[list[TermValue | TermError], TermReport]:
        term, start = self._terms[name], time.perf_counter()
        outcomes = list(await term.score(completions, prompt))
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, TermError)]
        if failed:
            # a term that compares completions needs all of them to value one
            asked = list(range(len(completions))) if term.compares_completions else failed
            again = await term.score([completions[i] for i in asked], prompt)
            for i, outcome in zip(asked, again, strict=True):
                outcomes[i] = outcome if i in failed else outcomes[i]
        for outcome in outcomes:
            rule = self._rules[name]
            if isinstance(outcome, TermError) and isinstance(rule, RuleConfig) and rule.on_error == "raise":
                raise RewardError(str(outcome)) from outcome.__cause__
        return outcomes, TermReport(seconds=time.perf_counter() - start, num_retried=len(failed))


def _with_rewards(trajectory: Trajectory, outcomes: Mapping[str, TermValue | TermError]) -> Trajectory:
    rewards: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, TermError):
            errors[name] = str(outcome)
        else:
            rewards[name] = outcome.reward
            rewards |= {f"{name}/{metric}": value for metric, value in outcome.metrics.items()}
    return replace(trajectory, rewards=rewards, reward_errors=errors)


def _make_term(name: str, config: AnyRuleConfig) -> Term:
    match config:
        case NumericRewardConfig():
            return NumericTerm(name, config)
        case MathRewardConfig():
            return MathTerm(name, config)
        case FormatRewardConfig():
            return FormatTerm(name, config)
        case PythonRewardConfig():
            return PythonTerm(name, config)
        case EnvironmentRewardConfig():
            return EnvironmentTerm()
        case CodeRewardConfig():
            from megarl.reward.test_cases import CodeTerm  # imports httpx

            return CodeTerm(name, config)
        case HttpRewardConfig():
            from megarl.reward.services import HttpTerm  # imports httpx

            return HttpTerm(name, config)
        case JudgeRewardConfig():
            from megarl.reward.services import JudgeTerm

            return JudgeTerm(name, config)
