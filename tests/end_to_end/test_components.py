"""Trainer, engine and rollout worker together: weights, log-probabilities, rewards, process deaths."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms.reinforce import reinforce_estimates
from megarl.config.algorithm import ReinforcePlusPlusConfig
from megarl.engines.engine import Sampling
from megarl.errors import RewardError, WorkerError
from megarl.megatron.request_samples import merge_column
from megarl.rollout import estimate_job
from megarl.run.remote.build import trainer_spec
from megarl.run.remote.rollout_group import RolloutGroup
from megarl.run.remote.trainer_group import make_trainer_group
from megarl.run.sync.weight_sync import WeightSync
from tests.end_to_end.components import Components, make_config, started
from tests.end_to_end.launched import MISMATCH, list_steps
from tests.end_to_end.tiny_world import PATIENCE
from tests.rollout.estimates import assert_same_bits, estimate_here, make_job
from tests.time_limits import HANG_SECONDS

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused(exported: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the Hugging Face tensors in SGLang's form, with fused query, key and value, and fused gate and up."""
    out = dict(exported)
    for whole, parts in FUSED.items():
        for first in [name for name in exported if f".{parts[0]}." in name]:
            out[first.replace(parts[0], whole)] = torch.cat([out.pop(first.replace(parts[0], p)) for p in parts])
    return out


def differing(served: dict[str, Tensor], exported: dict[str, Tensor]) -> list[str]:
    """Return the names of parameters that differ in any bit; the engine's padding rows of the vocabulary must be 0."""
    want = fused(exported)
    assert served.keys() == want.keys()
    return [name for name in want if not same_bits(served[name], want[name])]


def same_bits(served: Tensor, exported: Tensor) -> bool:
    rows = len(exported)
    return torch.equal(served[:rows].view(torch.int32), exported.view(torch.int32)) and not served[rows:].any()


def test_engine_weights_equal_the_export_bitwise(components, tmp_path):
    for version in (0, 1):
        exported = components.exported(tmp_path / f"exported-{version}")
        components.overwrite_served(exported)
        assert len(differing(components.served(tmp_path / f"noise-{version}"), exported)) > len(fused(exported)) / 2
        report = components.weights.push(version)
        assert components.weights.policy_version == version
        assert differing(components.served(tmp_path / f"served-{version}"), exported) == []
        # both ranks hold all weights: nothing is sent between them, and each tensor is delivered once
        stats = report.stats
        assert (stats.bytes_sent, stats.bytes_received) == (0, 0)
        assert stats.bytes_delivered == report.bytes_moved == sum(t.nbytes for t in exported.values())
        assert stats.buckets > 2
        groups = components.sample(f"weights-{version}")
        assert {v for g in groups for t in g.summary.trajectories for v, _ in t.tokens_by_version} == {version}
        components.train(groups)
    first, second = (load_file(tmp_path / f"exported-{version}" / "model.safetensors") for version in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_sampled_and_recomputed_log_probabilities_agree(components):
    components.weights.push(2)
    groups = components.sample("agree")
    stats = components.train(groups)
    assert 0 < stats.metrics[MISMATCH] <= 1e-4
    assert stats.num_tokens == sum(t.num_tokens for g in groups for t in g.summary.trajectories)
    # the weights have changed: log-probabilities sampled with the old ones no longer agree
    assert components.train(groups).metrics[MISMATCH] > 1e-3


@pytest.fixture(scope="module")
def failing(components: Components, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutGroup]:
    """Two rollout workers whose reward fails on some prompts."""
    path = "tests.end_to_end.rewards:capricious"
    term = {"type": "python", "path": path, "timeout_seconds": PATIENCE, "on_error": "raise"}
    rollout = {"max_new_tokens": 12, "workers": 2}
    config = make_config(world, tmp_path_factory.mktemp("rewards"), rollout=rollout, reward={"terms": {"odd": term}})
    group = RolloutGroup(config, components.engines)
    group.start()
    components.weights.push(3)
    yield group
    group.shutdown()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (1, r"raised KeyError: 'no such column' \(at .*rewards\.py:\d+\) on "),
        (2, r"returned nan, not a finite number, on "),
    ],
)
def test_error_of_a_failing_reward_names_term_and_prompt(row, message, components, failing):
    (prompt,) = (p for p in components.prompts if p.prompt_id.endswith(f":{row}"))
    sampling = Sampling(temperature=1.0, max_new_tokens=4)
    label = r"^reward\.terms\.odd \(tests\.end_to_end\.rewards:capricious\) "
    with pytest.raises(RewardError, match=label + message + re.escape(prompt.prompt_id) + ", completion "):
        failing.collect([prompt], num_samples=2, sampling=sampling, label=f"reward-{row}")


def test_workers_continue_after_a_reward_error_and_share_an_estimate(components, failing, monkeypatch):
    """Returns of sampled tokens, whitened over all groups: the bits are those that one process computes."""
    monkeypatch.setattr(estimate_job, "TOKENS_PER_WORKER", 1)
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    groups = failing.collect(components.prompts[2:7], num_samples=2, sampling=sampling, label="good")
    assert [g.summary.group_id for g in groups] == [0, 1, 2, 3, 4]
    assert [t.rewards["odd"] for g in groups for t in g.summary.trajectories] == [1.0] * 10
    trajectories = [group.payload.fetch() for group in groups]
    arguments = (ReinforcePlusPlusConfig(gamma=0.9, kl_reward=None), 0.0)
    rewards = np.random.default_rng(0).normal(size=10).tolist()
    job = make_job(reinforce_estimates, arguments, trajectories, rewards, {}, ("advantages",))
    summary, columns = failing.estimate(job, groups)
    column = columns["advantages"]
    assert len(column.refs) == 2
    found = summary, {"advantages": merge_column(column.fetch())}
    assert_same_bits(found, estimate_here(job, trajectories))


def test_log_probabilities_agree_only_if_the_trainer_uses_the_sampling_temperature(components, world, tmp_path):
    config = make_config(world, tmp_path, rollout={"max_new_tokens": 12, "sampling": {"temperature": 0.7}})
    cool_trainer = make_trainer_group(config, components.processes)
    cool_trainer.start_workers(trainer_spec(config)).result(HANG_SECONDS)
    WeightSync.between(config, cool_trainer, components.engines, components.pool).push(4)
    groups = components.sample("cool", temperature=0.7)
    assert 0 < components.train(groups, cool_trainer).metrics[MISMATCH] <= 1e-4
    components.weights.push(5)
    assert components.train(components.sample("wrong", temperature=0.7)).metrics[MISMATCH] > 1e-2


@pytest.mark.parametrize("update", ["in_place", "abort"])
def test_pushes_while_requests_run(update, components, world, tmp_path):
    """Tokens of the last version agree with the trainer, except for those on a KV cache of older weights."""
    schedule = {"type": "async", "lookahead": 2, "max_staleness": 3, "update": update}
    rollout = {"max_new_tokens": 100}
    components.run(make_config(world, tmp_path / "run", trainer={"steps": 6}, rollout=rollout, schedule=schedule))
    rows = list_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert max(row["staleness/max"] for row in rows) <= 3
    assert max(row[MISMATCH] for row in rows) <= 1e-4
    assert max(row["drift/logprob_abs_mean"] for row in rows) > 1e-3
    if update == "in_place":
        assert max(row["policy/mixed_kv"] for row in rows) > 0


def test_each_of_two_policies_samples_with_its_own_weights(components, world, tmp_path):
    algorithm = {
        "type": "tests.algorithms.test_custom_algorithm:Duel",
        "kl_loss": None,
        "group_size": 2,
        "prompts_per_step": 4,
        "other": {"optimizer": {"lr": 1e-2, "warmup_steps": 0}},
    }
    components.run(make_config(world, tmp_path / "run", algorithm=algorithm, trainer={"steps": 3}))
    steps = list_steps(tmp_path / "run")
    assert len(steps) == 3
    for row in steps:
        assert row["other/grad_norm"] > 0
        assert row[MISMATCH] <= 1e-4
        assert row[f"other/{MISMATCH}"] <= 1e-4


@pytest.mark.slow
def test_killed_scheduler_fails_the_request_with_its_log_tail(ranks, world, tmp_path):
    config = make_config(world, tmp_path, rollout={"max_new_tokens": 120}, recovery={"max_restarts": 0})
    message = r"(?s)^the engine's scheduler process of TP rank 0 was ended by SIGKILL; the end of .*:\n."
    with started(config, ranks) as doomed:
        (health,) = doomed.engines.call("health")
        sampling = Sampling(temperature=1.0, max_new_tokens=100)
        # suspended, it answers nothing: requests before and after its end fail alike
        os.kill(health.scheduler_pids[0], signal.SIGSTOP)
        Timer(1, os.kill, (health.scheduler_pids[0], signal.SIGKILL)).start()
        with pytest.raises(WorkerError, match=message):
            list(doomed.rollout.stream([*doomed.prompts] * 4, num_samples=4, sampling=sampling, label="doomed"))
