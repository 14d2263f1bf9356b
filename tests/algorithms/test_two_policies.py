"""Two policies in one run: which weights the engines have when either samples, and what each is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl import algorithms as rl
from megarl.algorithms.grpo import group_estimates, group_outputs
from megarl.config.algorithms.group_baseline import GrpoConfig
from megarl.errors import ConfigError
from tests.algorithms.scripted_run import run_script


class DuelConfig(GrpoConfig):
    """The section `algorithm` of the tests."""

    other: rl.TrainedModelConfig = rl.TrainedModelConfig()
    trains_policy: bool = True
    serves: str = "other"

    def models(self) -> tuple[rl.ModelUse, ...]:
        return (*super().models(), rl.ModelUse(name="other", field="other", section=self.other))


class Duel(rl.Algorithm[DuelConfig]):
    Config = DuelConfig

    def train(self, run: rl.RLRun, config: DuelConfig) -> None:
        loss, outputs = rl.ClippedLoss.of(config), group_outputs(config)
        run.begin()
        for prompts in run.steps():
            run.serve(config.serves)
            first = run.sample(prompts)
            lengths = [float(len(ids)) for ids in first.fetch_sampled_tokens()]
            run.serve()
            second = run.sample(prompts, attempt=1)
            first.add_to_rewards("length", lengths)
            run.estimate(group_estimates, first, config, 0.0, outputs=outputs)
            run.train_model(first, "other", run.policy_loss(loss))
            run.serve("other")
            run.estimate(group_estimates, second, config, 0.0, outputs=outputs)
            run.finish_step(second, run.train_policy(second, loss) if config.trains_policy else None)


def duel(folder: Path, **options: Any) -> Any:
    algorithm = {"type": f"{__name__}:Duel", "kl_loss": None, **options.pop("algorithm", {})}
    return run_script(folder, algorithm, lambda label, number, sample: 0.0, steps=2, **options)


@pytest.mark.parametrize("trains_policy", [True, False])
def test_each_model_is_pushed_before_it_samples_and_the_policy_at_the_end(tmp_path: Path, trains_policy: bool) -> None:
    run = duel(tmp_path, algorithm={"trains_policy": trains_policy})
    order = [name for name in run.call_order if name.split()[0] in ("weights", "engines")]
    step = ["engines sample", "weights push", "engines sample", "weights push other", "weights push"]
    assert order == [*step, "weights push other", *step]
    versions = [call.argument for call in run.log if call.target == "weights"]
    last = [1, 2] if trains_policy else [0, 0]
    assert versions == [0, 0, 0, 0, last[0], last[0], last[0], last[0], last[1]]


def test_the_other_model_is_trained_on_its_own_completions_and_rewards(tmp_path: Path) -> None:
    run = duel(tmp_path)
    request = run.arguments("other", "train")[0]
    advantages = [sample.scalars["advantages"] for batch in request.mini_batches for sample in batch.samples]
    assert advantages == pytest.approx([-1, 0, 1] * 2, abs=1e-4), "completions of 3, 4 and 5 tokens"
    policy = run.arguments("policy", "train")[0]
    assert {sample.scalars["advantages"] for batch in policy.mini_batches for sample in batch.samples} == {0.0}
    assert type(request.loss) is type(policy.loss)
    assert run.metrics[0]["other/loss"] == 1.0


def test_a_schedule_that_samples_ahead_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^schedule.type: needs sync, because .* serve the model 'other', got async"):
        duel(tmp_path, schedule={"type": "async"})
