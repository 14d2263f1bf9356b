"""Trainer, engine and rollout worker together: weights, log-probabilities, rewards, process deaths."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.util import remove_placement_group
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms.reinforce import reinforce_estimates
from megarl.batch.sample_table import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.config.algorithms.reinforce_family import ReinforcePlusPlusConfig
from megarl.errors import RewardError, WorkerError
from megarl.functional.losses import Denominators
from megarl.groups.build import trainer_spec
from megarl.groups.estimation import estimate_job
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.trainer_group import TrainerGroup, make_rank_processes, make_trainer_group
from megarl.groups.weight_sync import WeightSync
from megarl.megatron.requests import MiniBatch, TrainRequest
from megarl.megatron.token_column import merge_column
from megarl.placement.pool import reserve
from megarl.rollout.engine import Sampling
from tests.end_to_end.components import Components, build, make_config
from tests.groups.estimates import assert_same_bits, estimate_here, make_job

LOGPROB_MISMATCH = "train_infer_mismatch/logprob_abs_max"


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


def test_engine_weights_equal_the_export_bitwise(components: Components, tmp_path: Path) -> None:
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
        versions = {(t.min_policy_version, t.max_policy_version) for g in groups for t in g.summary.trajectories}
        assert versions == {(version, version)}
        components.train(groups)
    first, second = (load_file(tmp_path / f"exported-{version}" / "model.safetensors") for version in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_sampled_and_recomputed_log_probabilities_agree(components: Components) -> None:
    components.weights.push(2)
    groups = components.sample("agree")
    stats = components.train(groups)
    assert 0 < stats.metrics[LOGPROB_MISMATCH] <= 1e-4
    assert stats.num_tokens == sum(t.num_tokens for g in groups for t in g.summary.trajectories)
    # the weights have changed: log-probabilities sampled with the old ones no longer agree
    assert components.train(groups).metrics[LOGPROB_MISMATCH] > 1e-3


@pytest.fixture(scope="module")
def failing(components: Components, world: Path, tmp_path_factory: pytest.TempPathFactory) -> RolloutGroup:
    term = {
        "type": "python",
        "path": "tests.end_to_end.rewards:capricious",
        "timeout_seconds": 0.5,
        "on_error": "raise",
    }
    config = make_config(world, tmp_path_factory.mktemp("rewards"), reward={"terms": {"odd": term}})
    group = RolloutGroup(config, components.engines)
    group.start()
    components.weights.push(3)
    return group


def test_workers_share_an_estimate(
    components: Components, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns of sampled tokens, whitened over all groups: the bits are those that one process computes."""
    monkeypatch.setattr(estimate_job, "TOKENS_PER_WORKER", 1)
    config = make_config(world, tmp_path, rollout={"workers": 2})
    rollout = RolloutGroup(config, components.engines)
    rollout.start()
    components.weights.push(4)
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    groups = rollout.collect(components.prompts[:5], num_samples=2, sampling=sampling, label="estimated")
    trajectories = [group.payload.fetch() for group in groups]
    arguments = (ReinforcePlusPlusConfig(gamma=0.9, kl_reward=None), 0.0)
    rewards = np.random.default_rng(0).normal(size=10).tolist()
    job = make_job(reinforce_estimates, arguments, trajectories, rewards, {}, ("advantages",))
    summary, columns = rollout.estimate(job, groups)
    column = columns["advantages"]
    assert len(column.refs) == 2
    found = summary, {"advantages": merge_column(column.fetch())}
    assert_same_bits(found, estimate_here(job, trajectories))
    rollout.shutdown()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (1, r"raised KeyError: 'no such column' \(at .*rewards\.py:\d+\) on "),
        (2, r"took longer than timeout_seconds = 0\.5 on "),
        (3, r"returned nan, not a finite number, on "),
    ],
)
def test_error_of_a_failing_reward_names_term_and_prompt(
    row: int, message: str, components: Components, failing: RolloutGroup
) -> None:
    (prompt,) = (p for p in components.prompts if p.prompt_id.endswith(f":{row}"))
    sampling = Sampling(temperature=1.0, max_new_tokens=4)
    label = r"^reward\.terms\.odd \(tests\.end_to_end\.rewards:capricious\) "
    with pytest.raises(RewardError, match=label + message + re.escape(prompt.prompt_id) + ", completion "):
        failing.collect([prompt], num_samples=2, sampling=sampling, label=f"reward-{row}")


def test_rollout_worker_continues_after_a_reward_error(components: Components, failing: RolloutGroup) -> None:
    groups = failing.collect(
        components.prompts[3:6], num_samples=2, sampling=Sampling(temperature=1.0, max_new_tokens=4), label="good"
    )
    assert [g.summary.group_id for g in groups] == [0, 1, 2]
    assert {t.reward for g in groups for t in g.summary.trajectories} == {1.0}


@dataclass(frozen=True)
class Deadly:
    """A payload that kills trainer rank 1 when it is read, while rank 0 proceeds to the first collective."""

    refs = ()

    def fetch(self) -> Sequence[Trajectory]:
        return self.load(())

    def load(self, values: Sequence[Any]) -> Sequence[Trajectory]:
        if os.environ["RANK"] == "1":
            sys.stderr.write("rank 1 read its last payload\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return [A_TRAJECTORY]


A_TRAJECTORY = Trajectory(
    prompt_id="1",
    group_id=0,
    token_ids=np.array([5, 6, 7], np.int32),
    loss_mask=np.array([False, True, True]),
    logprobs=np.zeros(3, np.float32),
    policy_versions=np.zeros(3, np.int32),
)


@pytest.fixture(scope="module")
def cool_trainer(
    components: Components, world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerGroup]:
    """Another trainer of the same model, for samples at temperature 0.7."""
    sampling = {"max_new_tokens": 12, "sampling": {"temperature": 0.7}}
    config = make_config(world, tmp_path_factory.mktemp("cool"), rollout=sampling)
    processes = make_rank_processes(pool := reserve(config.placement), "trainer")
    trainer = make_trainer_group(config, processes)
    trainer.start_workers(trainer_spec(config)).result(120)
    yield trainer
    processes.stop()
    remove_placement_group(pool.group)


def test_log_probabilities_agree_only_if_the_trainer_uses_the_sampling_temperature(
    components: Components, cool_trainer: TrainerGroup
) -> None:
    WeightSync(components.config, cool_trainer, components.engines, components.pool).push(4)
    groups = components.sample("cool", temperature=0.7)
    assert 0 < components.train(groups, cool_trainer).metrics[LOGPROB_MISMATCH] <= 1e-4
    components.weights.push(5)
    assert components.train(components.sample("wrong", temperature=0.7)).metrics[LOGPROB_MISMATCH] > 1e-2


def test_killed_trainer_rank_is_reported_with_its_log_tail(cool_trainer: TrainerGroup) -> None:
    """Must be the last test that uses this trainer."""
    sample = SampleRef(payload=0, index=0, num_tokens=3)
    batch = MiniBatch(samples=(sample, sample), denominators=Denominators(num_tokens=4, num_sequences=2))
    work = TrainRequest(mini_batches=(batch,), payloads=(Deadly(),), max_tokens_per_micro_batch=100)
    with pytest.raises(WorkerError) as error:
        cool_trainer.train_step(work)
    text = str(error.value)
    assert text.startswith("trainer.train_step: trainer rank 1 died. ")
    assert re.search(r"\nthe end of \S+\.err:\n(.*\n)*rank 1 read its last payload$", text)


@pytest.mark.slow
def test_killed_scheduler_fails_the_request_with_its_log_tail(cluster: None, world: Path, tmp_path: Path) -> None:
    doomed = build(make_config(world, tmp_path, rollout={"max_new_tokens": 120}, recovery={"max_restarts": 0}))
    (health,) = doomed.engines.call("health")
    sampling = Sampling(temperature=1.0, max_new_tokens=100)
    stream = doomed.rollout.stream(doomed.prompts * 4, num_samples=4, sampling=sampling, label="doomed")
    next(stream)
    os.kill(health.scheduler_pids[0], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"(?s)^the engine's scheduler process of TP rank 0 was ended by SIGKILL; the end of .*:\n."
    ):
        list(stream)
    doomed.close()
