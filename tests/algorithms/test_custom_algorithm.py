"""Algorithms outside the package: the examples, refusals, and one that trains two policies in a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from ray import cloudpickle

from megarl import algorithms as rl
from megarl.algorithms import BUILT_IN, find_algorithm
from megarl.algorithms.grpo import group_estimates, group_outputs
from megarl.batch.pack import PackedBatch, pack
from megarl.config import RunConfig, dump_config, load_config
from megarl.config.algorithm import AlgorithmConfig, GrpoConfig
from megarl.errors import ConfigError
from megarl.functional import Denominators, Sequences
from megarl.losses import LossBatch, TokenScores
from megarl.megatron.requests import TrainRequest
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.algorithms.test_all_algorithms import columns_of
from tests.config.runs import error_message, make_run
from tests.errors import expect_error
from tests.run.finished_groups import completion

EXAMPLE = Path(__file__).parents[2] / "examples/custom-algorithm"
SOFT_CLIP: dict[str, Any] = {"type": "my_algorithm:SoftClip", "steepness": 2.0, "anchor_coefficient": 0.5}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import my_algorithm

    return my_algorithm


def test_the_recipe_loads_with_the_examples_own_section(example: Any) -> None:
    config = load_config(RunConfig, EXAMPLE / "demo.yaml")
    assert type(config.algorithm) is example.SoftClipConfig
    assert find_algorithm(config.algorithm.type) is example.SoftClip
    assert cloudpickle.loads(cloudpickle.dumps(config)) == config


def test_the_resolved_configuration_loads_again(example: Any, tmp_path: Path) -> None:
    config = make_run(algorithm=SOFT_CLIP | {"anchor": {"path": "other"}})
    text = dump_config(config)
    assert "steepness: 2.0" in text
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(RunConfig, tmp_path / "config.yaml") == config


def test_the_auxiliary_model_has_a_folder_a_layout_and_a_pool(example: Any) -> None:
    (anchor,) = make_run(algorithm=SOFT_CLIP).auxiliary_models
    assert (anchor.name, anchor.key, anchor.path, anchor.pool) == ("anchor", "algorithm.anchor", "m", "main")
    assert anchor.optimizer is None
    placement = {"slots_per_node": 2, "pools": {"b": {"slots_per_node": 2}}, "models": {"anchor": {"pool": "b"}}}
    algorithm = SOFT_CLIP | {"anchor": {"path": "other", "parallel": {"tp": 2}}}
    (anchor,) = make_run(algorithm=algorithm, placement=placement).auxiliary_models
    assert (anchor.path, anchor.parallel.tp, anchor.pool) == ("other", 2, "b")


def test_options_of_the_package_apply_to_the_section(example: Any) -> None:
    config = make_run(algorithm=SOFT_CLIP | {"kl_loss": {"coefficient": 0.1}, "rollout_is": {}})
    assert [model.name for model in config.auxiliary_models] == ["reference", "anchor"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steepness": -1}, "algorithm.steepness: Input should be greater than 0, got -1"),
        ({"clip_ratio_low": 0.1, "group_size": 4}, "algorithm: clip_ratio_low: the loss of my_algorithm:Soft"),
        ({"unknown": 1}, "algorithm.unknown: unknown key"),
        ({"anchor": {"folder": "x"}}, "algorithm.anchor.folder: unknown key"),
        ({"group_size": 1}, "group_size needs to be at least 2, got 1: my_algorithm:SoftClip compares"),
        ({"preset": "paper"}, "preset: my_algorithm:SoftClip has the presets default, got 'paper'"),
        ({"type": "no_such_module:X"}, "algorithm.type: cannot import no_such_module"),
        ({"type": "my_algorithm:Nothing"}, "algorithm.type: module my_algorithm"),
        ({"type": "my_algorithm:median_advantages"}, "algorithm.type needs a class with a method train(run, config), "),
        (
            {"type": f"{__name__}:WithoutConfig"},
            "WithoutConfig.Config needs to be a subclass of PolicyConfig, got None",
        ),
        ({"type": ":X"}, "algorithm.type needs package.module:Class, got ':X'"),
        ({"type": "grpox"}, "algorithm.type: needs one of 'grpo', 'dr_grpo', "),
    ],
)
def test_invalid_fields_and_import_paths_are_named(example: Any, fields: dict[str, Any], message: str) -> None:
    assert message in error_message(algorithm=SOFT_CLIP | fields)


def test_pools_of_other_models_are_refused(example: Any) -> None:
    placement = {"pools": {"b": {}}, "models": {"other": {"pool": "b"}}}
    assert "the run has no such model" in error_message(algorithm=SOFT_CLIP, placement=placement)


class WithoutConfig:
    def train(self, run: Any, config: Any) -> None: ...


def test_built_in_algorithms_are_those_of_the_configuration() -> None:
    for algorithm in BUILT_IN:
        kind = algorithm.Config.model_fields["type"].default
        section = {"type": kind, "teacher": {"path": "t"}} if kind == "distillation" else {"type": kind}
        config: Any = TypeAdapter(AlgorithmConfig).validate_python(section)
        assert type(config) is algorithm.Config
        assert find_algorithm(kind) is algorithm


def test_the_loop_trains_on_median_advantages_with_the_anchors_logprobs(example: Any, tmp_path: Path) -> None:
    rewards = [[0.0, 1.0, 5.0], [2.0, 2.0, -1.0]]
    run = run_script(tmp_path, SOFT_CLIP, lambda label, number, sample: rewards[number][sample], steps=2)
    assert run.call_order == ["engines sample", "anchor logprobs", "policy train", "weights push"] * 2
    request: TrainRequest = run.arguments("policy", "train")[0]
    (batch,) = request.mini_batches
    assert [sample.scalars["advantages"] for sample in batch.samples] == [-1.0, 0.0, 4.0, 0.0, 0.0, -3.0]
    assert set(request.columns) == {"anchor_logprobs"}
    assert cloudpickle.loads(cloudpickle.dumps(request.loss)) == request.loss


def test_the_token_loss_matches_a_loop(example: Any) -> None:
    rng = np.random.default_rng(0)
    mask = [0, 0, 1, 1, 1, 0, 1]
    columns = {name: rng.normal(size=7).astype(np.float32) for name in ("old_logprobs", "anchor_logprobs")}
    packed = pack([completion(mask)], {**{name: [values] for name, values in columns.items()}, "advantages": [0.7]})
    denominators = Denominators(num_tokens=4, num_sequences=1)

    def loss_of(logprobs_T: torch.Tensor, given: PackedBatch) -> Any:
        batch = LossBatch(pack=given, denominators=denominators, sequences=Sequences.of(given.cu_seqlens_S))
        return example.SoftClipLoss(2.0, 0.5)(TokenScores(logprobs_T=logprobs_T, entropy_T=logprobs_T), batch)

    logprobs_T = torch.tensor(rng.normal(size=7))
    output = loss_of(logprobs_T, packed)
    for t in np.flatnonzero(packed.mask_T.numpy()):
        new = logprobs_T[t].item()
        ratio, d = np.exp(new - columns["old_logprobs"][t + 1]), new - columns["anchor_logprobs"][t + 1]
        want = -0.7 * (4 / 2.0) / (1 + np.exp(-2.0 * (ratio - 1))) + 0.5 * (np.exp(-d) - 1 + d)
        assert float(output.loss_T[t]) == pytest.approx(want, rel=1e-5)
        assert float(output.ratio_T[t]) == pytest.approx(ratio, rel=1e-5)
    at_T = torch.from_numpy(columns["old_logprobs"]).roll(-1).requires_grad_()
    at_anchor = packed.with_column("anchor_logprobs", at_T.detach())
    (gradient,) = torch.autograd.grad(loss_of(at_T, at_anchor).loss_T.sum(), at_T)
    # at ratio 1 and at the anchor the slope is that of the policy gradient, -A
    assert gradient[packed.mask_T].tolist() == pytest.approx([-0.7] * 4, rel=1e-5)


def test_the_algorithm_is_short_and_uses_no_private_names() -> None:
    lines = (EXAMPLE / "my_algorithm.py").read_text().splitlines()
    assert len(lines) < 60
    assert not any("._" in line for line in lines)


def test_the_module_is_found_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console script does not have the working directory on its path."""
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder and Path(folder) != EXAMPLE])
    monkeypatch.delitem(sys.modules, "my_algorithm", raising=False)
    assert type(load_config(RunConfig, EXAMPLE / "demo.yaml").algorithm).__name__ == "SoftClipConfig"


def reward(label: str, number: int, sample: int) -> float:
    """Greedy completions have 2 and 3, the samples of a prompt 0, 1 and 2."""
    return 2.0 + number if "greedy" in label else float(sample)


def trained_advantages(finished: FinishedRun) -> dict[Any, Any]:
    """Return the advantages of the training request of the policy, by sample."""
    (request,) = finished.arguments("policy", "train")
    return columns_of(request)["advantages"]


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_the_nested_algorithm_has_advantages_of_ppo_for_rewards_minus_greedy_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent / "nested-algorithm"))
    options: dict[str, Any] = {"kl_reward": None, "whiten": False}
    sections = {"schedule": {"type": schedule, "lookahead": 0, "max_staleness": 0}} if schedule == "async" else {}
    nested = run_script(tmp_path / "a", {"type": "nested:Nested", **options}, reward, **sections)
    shifted = run_script(tmp_path / "b", {"type": "ppo", **options}, lambda _, number, sample: sample - 2.0 - number)
    found, expected = map(trained_advantages, (nested, shifted))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, atol=1e-6)
    plain = run_script(tmp_path / "c", {"type": "ppo", **options}, lambda _, number, sample: float(sample))
    other = trained_advantages(plain)
    assert any(np.abs(other[key] - found[key]).max() > 1 for key in found)


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
    with expect_error(ConfigError, "schedule.type", "'other'"):
        duel(tmp_path, schedule={"type": "async"})
