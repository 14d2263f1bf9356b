"""The section `eval`: how held-out rows are evaluated."""

from __future__ import annotations

from pydantic import Field

from megarl.config.section import Section


class EvalConfig(Section):
    """Evaluation on the held-out rows of `data.eval_path`, or of `data.sources.NAME.eval_path`."""

    samples: int = Field(default=1, ge=1)
    """Number of completions per prompt. 1: a greedy one. More are sampled with `rollout.sampling`, with the same seeds
    in each evaluation. Then `eval/<term>` is their mean, and `eval/<term>/pass@k` the probability that one of k passes,
    for k = 2, 4, ... and `samples`."""

    pass_reward: float = 1.0
    """A completion passes if the value of the term is at least this."""
