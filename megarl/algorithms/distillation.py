"""On-policy distillation: the policy writes, a teacher says of each token how likely it would have been."""

from __future__ import annotations

from megarl.config.algorithms.algorithm import DistillationConfig
from megarl.groups.estimation import Estimates, StepTokens
from megarl.run.rl_run import PolicyRun


def train_distillation(run: PolicyRun, algorithm: DistillationConfig) -> None:
    """Rewards are reported and teach nothing."""
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference(batch)
        run.add_logprobs(batch)
        with run.phase("teacher"):
            work = batch.evaluation_work(run.config)
            batch.columns["teacher_logprobs"] = run.models.frozen["teacher"].logprobs(work)
        run.estimate(distillation_estimates, batch, gives=("advantages",))
        run.finish_step(batch, run.train_policy(batch))


def distillation_estimates(tokens: StepTokens) -> Estimates:
    """Log pi_teacher - log pi of each token."""
    advantages_T = tokens.columns["teacher_logprobs"] - tokens.columns["old_logprobs"]
    return tokens.with_advantages(advantages_T, {"distillation/reverse_kl": -tokens.mean(advantages_T)})
