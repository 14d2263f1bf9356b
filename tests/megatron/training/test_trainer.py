"""The steps of reinforcement learning: policy loss, mini-batches, metrics, clipping, the weights pushed after them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.batch.trajectory import Trajectory
from megarl.config.algorithms.algorithm import GrpoConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.functional.losses import Denominators
from megarl.megatron.requests import MiniBatch, ModelSpec, SampleRef, SurrogateLoss, TrainerSpec, TrainWork, split_by_dp
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import LocalPayload
from tests.megatron.fidelity.measure import assemble, collect_gradients, worst_gradient
from tests.megatron.fidelity.reference import differentiate, score
from tests.megatron.ranks import CollectingSink, run_ranks

LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "dp2": {},
}


def make_trajectories(count=24, vocab=331, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(2, 90))
        mask = np.zeros(n, bool)
        mask[int(rng.integers(1, n)) :] = True
        if n > 12:
            mask[n // 2 + 2] = False  # a hole, as tool output leaves it
        out.append(
            Trajectory(
                prompt_id=str(i),
                group_id=i // 4,
                token_ids=rng.integers(2, vocab, n).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return out


TRAJECTORIES = make_trajectories()
ADVANTAGES = tuple(np.random.default_rng(1).normal(size=len(TRAJECTORIES)).tolist())
TOKENS = tuple(tuple(t.token_ids.tolist()) for t in TRAJECTORIES)
MASKS = tuple(tuple(t.loss_mask.tolist()) for t in TRAJECTORIES)
EVERY = range(len(TRAJECTORIES))
HALVES = (range(12), range(12, 24))


def make_work(*mini_batches, max_tokens=256):
    """One optimizer step on each: indices into TRAJECTORIES."""
    return TrainWork(
        mini_batches=tuple(map(mini_batch, mini_batches)),
        payloads=(LocalPayload(TRAJECTORIES),),
        max_tokens_per_micro_batch=max_tokens,
        loss=SurrogateLoss(algorithm=GrpoConfig(kl_loss=None), length_norm=1),
    )


def mini_batch(indices):
    count = Denominators(num_tokens=sum(sum(MASKS[i]) for i in indices), num_sequences=len(indices))
    return MiniBatch(
        samples=tuple(
            SampleRef(payload=0, index=i, num_tokens=TRAJECTORIES[i].num_tokens, scalars={"advantages": ADVANTAGES[i]})
            for i in indices
        ),
        denominators=count,
    )


def train_on_rank(path, parallel, optimizer, work):
    """One controller step: its metrics, the gradients before each optimizer step, the weights pushed after the last."""
    import torch.distributed as dist

    from megarl.config.weight_sync import WeightSyncConfig
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.hf_weights.weight_push import WeightPusher
    from megarl.megatron.requests import SyncSetup
    from megarl.megatron.training.trainer import MegatronTrainer
    from megarl.reshard.planning.strategy import Outlets

    model = ModelSpec(model_path=path, dtype="float32", parallel=parallel)
    trainer = MegatronTrainer(TrainerSpec(model=model, optimizer=optimizer, optimizer_steps=10))
    grid = RankGrid.of(parallel, dist.get_world_size())
    gradients = []
    prepare = trainer._optimizer.prepare_grads

    def keep_gradients_then_prepare():
        gradients.append(collect_gradients(trainer))
        return prepare()

    trainer._optimizer.prepare_grads = keep_gradients_then_prepare
    stats = trainer.train_step(split_by_dp(work, grid)[dist.get_rank()])
    sink = CollectingSink()
    config = WeightSyncConfig(strategy="gather_hf", bucket_bytes=20_000)
    pusher = WeightPusher(trainer.rank, SyncSetup(config=config, outlets={0: Outlets(whole=(sink,))}))
    pusher.push()
    pusher.close()
    everyone = [None] * grid.size
    dist.all_gather_object(everyone, (stats.metrics, trainer.rank.layout, gradients))
    if dist.get_rank() != 0:
        return None
    layouts, of_rank = [each[1] for each in everyone], [each[2] for each in everyone]
    whole = [assemble(layouts, list(of_step)) for of_step in zip(*of_rank, strict=True)]
    return everyone[grid.output_rank(0)][0], whole, sink.tensors


@pytest.fixture(scope="module")
def path(model_folder):
    return model_folder("qwen3")


@pytest.fixture
def train(path, tmp_path):
    def run(work, *, world=1, lr=1e-3, eps=1e-8, clip_grad=1.0, **parallel):
        # replicated: the distributed optimizer leaves in each rank's buffers the reduced gradient of its part alone
        optimizer = OptimizerConfig(lr=lr, eps=eps, clip_grad=clip_grad, distributed=False)
        return run_ranks(train_on_rank, world, tmp_path, path, ParallelConfig(**parallel), optimizer, work)

    return run


@cache
def logprobs_of(folder, indices):
    """Of all counted tokens of these trajectories, and each one's advantage."""
    scores = score(folder, TOKENS)
    masks = [torch.tensor(MASKS[i][1:]) for i in indices]
    return (
        torch.cat([scores[i][mask] for i, mask in zip(indices, masks, strict=True)]),
        torch.cat([torch.full((int(mask.sum()),), ADVANTAGES[i]) for i, mask in zip(indices, masks, strict=True)]),
    )


def test_the_first_step_is_on_policy(train, path):
    metrics, (gradients,), _ = train(make_work(EVERY))
    want = differentiate(path, TOKENS, MASKS, ADVANTAGES)
    worst, name = worst_gradient(gradients, want.gradients)
    assert worst < 1e-5, name
    _, advantages = logprobs_of(path, EVERY)
    assert metrics["loss"] == pytest.approx(-float(advantages.mean()), abs=1e-6)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/kl_old"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/clip_fraction"] == 0


def test_the_gradient_norm_is_that_before_clipping(train):
    metrics, (gradients,), _ = train(make_work(EVERY), clip_grad=0.01)
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    assert norm > 0.1
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("clip_grad", [0.0, 0.05, 1e3])
def test_gradients_are_scaled_to_the_norm_they_are_clipped_at(clip_grad, train, path):
    # With such an epsilon Adam's first step is lr / eps * g.
    metrics, (gradients,), weights = train(make_work(EVERY), lr=100.0, eps=1e3, clip_grad=clip_grad)
    scale = min(1.0, clip_grad / metrics["grad_norm"]) if clip_grad else 1.0
    disk = load_file(f"{path}/model.safetensors")
    for name, gradient in gradients.items():
        step = (disk[name] - weights[name]) / (0.1 * scale)
        assert (step - gradient).abs().max() < 0.01 * gradient.abs().max() + 1e-6 / scale, name


def test_a_later_mini_batch_compares_with_the_policy_before_the_first(train, path, tmp_path):
    _, _, after_first = train(make_work(HALVES[0]))
    moved = tmp_path / "moved"
    shutil.copytree(path, moved)
    save_file(after_first, moved / "model.safetensors", metadata={"format": "pt"})
    metrics, _, _ = train(make_work(*HALVES))
    old, advantages = logprobs_of(path, HALVES[1])
    new, _ = logprobs_of(str(moved), HALVES[1])
    ratio = (new - old).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    assert 0.05 < float((clipped > unclipped).float().mean()) < 0.95
    _, first_advantages = logprobs_of(path, HALVES[0])
    expected = {
        "policy/ratio": (1 + ratio.mean()) / 2,
        "policy/ratio_max": ratio.max(),
        "policy/kl_old": (old - new).mean() / 2,
        "policy/clip_fraction": (clipped > unclipped).float().mean() / 2,
        "loss": (torch.maximum(unclipped, clipped).mean() - first_advantages.mean()) / 2,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-3, abs=1e-4), name


def test_mismatch_is_that_with_what_the_engine_said(train, path):
    metrics, _, _ = train(make_work(*HALVES))
    # whatever the first mini-batch changed
    found = [logprobs_of(path, half)[0] + 5.0 for half in HALVES]
    expected = {
        "mismatch/logprob_abs_max": max(float(d.abs().max()) for d in found),
        "mismatch/logprob_abs_mean": sum(float(d.abs().mean()) for d in found) / 2,
        "mismatch/kl": sum(float((d.exp() - 1 - d).mean()) for d in found) / 2,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name


@pytest.fixture(scope="module")
def one_rank(path, tmp_path_factory):
    optimizer = OptimizerConfig(lr=1e-4, distributed=False)
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(train_on_rank, 1, folder, path, ParallelConfig(), optimizer, make_work(*HALVES))


def assert_same_step(got, want):
    for name, value in want[0].items():
        assert got[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert got[2].keys() == want[2].keys()
    for name, weight in want[2].items():
        assert (got[2][name] - weight).abs().max() <= 2e-5, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_and_pushed_weights_are_those_of_one_rank(layout, train, one_rank):
    assert_same_step(train(make_work(*HALVES), world=2, lr=1e-4, **LAYOUTS[layout]), one_rank)


@pytest.mark.parametrize("max_tokens", [90, 10_000])
def test_micro_batch_size_changes_nothing(max_tokens, train, one_rank):
    work = replace(make_work(*HALVES), max_tokens_per_micro_batch=max_tokens)
    assert_same_step(train(work, lr=1e-4), one_rank)
