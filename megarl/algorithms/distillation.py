"""On-policy distillation: a teacher scores each token that the policy samples."""

from __future__ import annotations

from typing import override

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithm import DistillationConfig
from megarl.losses.policy_loss import ClippedLoss
from megarl.rollout.estimation.estimators import EstimatorOutput, TokenBatch, by_groups
from megarl.run.rl_run import RLRun


class Distillation(Algorithm[DistillationConfig]):
    """On-policy distillation: advantages come from a teacher, not from rewards."""

    Config = DistillationConfig

    @override
    def train(self, run: RLRun, config: DistillationConfig) -> None:
        """Run the distillation loop; rewards are only logged, advantages come from the teacher."""
        run.begin()
        for prompts in run.steps():
            batch = run.sample(prompts)
            run.add_reference_logprobs(batch)
            run.add_logprobs(batch)
            run.add_model_logprobs(batch, "teacher", "teacher_logprobs")
            run.estimate(distillation_estimates, batch, outputs=("advantages",))
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


@by_groups
def distillation_estimates(tokens: TokenBatch) -> EstimatorOutput:
    """Return the advantage log pi_teacher - log pi of each sampled token."""
    advantages_T = tokens.columns["teacher_logprobs"] - tokens.columns["old_logprobs"]
    return tokens.with_advantages(advantages_T, {"distillation/reverse_kl": tokens.token_mean(-advantages_T)})
