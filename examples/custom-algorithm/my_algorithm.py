"""An algorithm outside the package: median baselines, a soft clip of the ratio, and an anchor model."""

from dataclasses import dataclass

import torch
from pydantic import Field

from megarl import rl


class SoftClipConfig(rl.PolicyConfig):
    """The section `algorithm` of a run with `SoftClip`."""

    needs_group = True
    steepness: float = Field(default=1.0, gt=0)
    """Steepness of the soft clip; larger values hold the importance ratio closer to 1."""
    anchor_coefficient: float = Field(default=0.01, ge=0)
    """Factor of the KL penalty against the anchor model."""
    anchor: rl.FrozenModelConfig = rl.FrozenModelConfig()
    """The model that the policy stays close to. Default: the initial policy."""

    def models(self) -> tuple[rl.ModelUse, ...]:
        return (*super().models(), rl.ModelUse(name="anchor", field="anchor", section=self.anchor))


@dataclass(frozen=True, slots=True)
class SoftClipLoss(rl.TokenLoss):
    """-A * 4 / s * sigmoid(s * (ratio - 1)), of slope -A at ratio 1 and flat far from it, plus the k3 penalty."""

    columns = ("advantages", "old_logprobs", "anchor_logprobs")
    steepness: float
    anchor_coefficient: float

    def __call__(self, scores: rl.TokenScores, batch: rl.LossBatch) -> rl.PolicyLossOutput:
        ratio_T = (scores.logprobs_T - batch.columns["old_logprobs"]).exp()
        gate_T = 4 / self.steepness * torch.sigmoid(self.steepness * (ratio_T - 1))
        distance_T = scores.logprobs_T - batch.columns["anchor_logprobs"]
        penalty_T = self.anchor_coefficient * ((-distance_T).exp() - 1 + distance_T)
        loss_T = penalty_T - batch.columns["advantages"] * gate_T
        return rl.PolicyLossOutput(loss_T, ratio_T.detach(), (ratio_T.detach() - 1).abs() > 1 / self.steepness)


def median_advantages(tokens: rl.TokenBatch) -> rl.EstimatorOutput:
    """Return each completion's reward minus the median of its group."""
    ids_N = tokens.group_ids_N
    medians = torch.stack([tokens.rewards_N[ids_N == i].quantile(0.5) for i in ids_N.unique()])
    return rl.EstimatorOutput(scalars={"advantages": tokens.rewards_N - medians[ids_N]})


class SoftClip(rl.Algorithm[SoftClipConfig]):
    Config = SoftClipConfig

    def train(self, run: rl.RLRun, config: SoftClipConfig) -> None:
        run.begin()
        for prompts in run.steps():
            batch = run.sample(prompts)
            run.add_model_logprobs(batch, "anchor", "anchor_logprobs")
            run.estimate(median_advantages, batch)
            run.finish_step(batch, run.train_policy(batch, SoftClipLoss(config.steepness, config.anchor_coefficient)))
