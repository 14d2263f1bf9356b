"""On-policy distillation: a teacher scores each token that the policy samples."""

from __future__ import annotations

from megarl.config.algorithms.model_advantages import DistillationConfig
from megarl.groups.estimation import EstimatorOutput, TokenBatch
from megarl.run.rl_run import RLRun


def train_distillation(run: RLRun, algorithm: DistillationConfig) -> None:
    """Run the distillation loop; rewards are only logged, advantages come from the teacher."""
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference_logprobs(batch)
        run.add_logprobs(batch)
        with run.phase("teacher"):
            request = batch.forward_request(run.config)
            batch.columns["teacher_logprobs"] = run.models.frozen["teacher"].logprobs(request)
        run.estimate(distillation_estimates, batch, outputs=("advantages",))
        run.finish_step(batch, run.train_policy(batch))


def distillation_estimates(tokens: TokenBatch) -> EstimatorOutput:
    """Return the advantage log pi_teacher - log pi of each sampled token."""
    advantages_T = tokens.columns["teacher_logprobs"] - tokens.columns["old_logprobs"]
    return tokens.with_advantages(advantages_T, {"distillation/reverse_kl": -tokens.masked_mean(advantages_T)})
