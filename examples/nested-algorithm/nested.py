"""PPO whose reward is compared with that of the greedy completion, as ReMax does: two algorithms on the same groups."""

from dataclasses import replace

from megarl import rl


class NestedConfig(rl.PpoConfig):
    """The section `algorithm`: that of PPO; each group also has a greedy completion."""

    needs_greedy_baseline = True


@rl.by_groups
def nested_estimates(tokens: rl.TokenBatch, config: NestedConfig, kl_coefficient: float) -> rl.EstimatorOutput:
    """Return PPO's advantages and returns for rewards minus those of the greedy completions."""
    rewards_N = tokens.rewards_N - tokens.scalars["greedy_rewards"]
    return rl.ppo_estimates(replace(tokens, rewards_N=rewards_N), config, kl_coefficient)


class Nested(rl.Algorithm[NestedConfig]):
    Config = NestedConfig

    def train(self, run: rl.RLRun, config: NestedConfig) -> None:
        run.begin()
        for prompts in run.steps():
            batch, greedy_rewards = run.sample_with_baselines(prompts)  # ReMax
            batch.scalars["greedy_rewards"] = [greedy_rewards[group] for group in batch.group_ids]
            run.add_reference_logprobs(batch)  # from here on PPO
            run.add_values(batch)
            run.estimate(nested_estimates, batch, config, run.kl_coefficient, outputs=("advantages", "returns"))
            run.train_critic(batch, config.critic)
            run.finish_step(batch, run.train_policy(batch, rl.ClippedLoss.of(config)))
