"""The trainer against transformers, and every layout against one rank: loss, gradient norm, every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.losses import Denominators
from megarl.batch.trajectory import Trajectory
from megarl.config.algorithm import GrpoConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.megatron.work import MiniBatch, SampleRef, TrainerSpec, TrainWork, split_by_dp
from megarl.placement.grid import RankGrid
from megarl.workers.payload import LocalPayload
from tests.megatron.ranks import CollectingSink, run_ranks

LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2 without sequence parallel": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dp2 replicated optimizer": {"dp": 2, "distributed": False},
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


def make_work(trajectories, *, policy_loss=None, max_tokens=256, seed=0):
    rng = np.random.default_rng(seed)
    samples = tuple(
        SampleRef(payload=0, index=i, num_tokens=t.num_tokens, advantage=float(rng.normal()))
        for i, t in enumerate(trajectories)
    )
    count = Denominators(num_tokens=int(sum(t.loss_mask.sum() for t in trajectories)), num_sequences=len(trajectories))
    return TrainWork(
        mini_batches=(MiniBatch(samples=samples, denominators=count),),
        payloads=(LocalPayload(trajectories),),
        max_tokens_per_micro_batch=max_tokens,
        policy_loss=policy_loss,
    )


def train_on_rank(path, parallel, distributed, dp, work, steps):
    """On every rank: train, then gather gradients and weights in Hugging Face coordinates on rank 0."""
    import torch.distributed as dist

    from megarl.config.weight_sync import WeightSyncConfig
    from megarl.megatron import platform

    platform.prepare()
    from megarl.megatron.push import WeightPusher
    from megarl.megatron.trainer import MegatronTrainer
    from megarl.megatron.work import SyncSetup
    from megarl.reshard.strategy import Outlets

    spec = TrainerSpec(
        model_path=path,
        dtype="float32",
        trainer=TrainerConfig(parallel=parallel, optimizer=OptimizerConfig(lr=1e-4, distributed=distributed)),
        optimizer_steps=10,
    )
    trainer = MegatronTrainer(spec)
    grid = RankGrid(tp=parallel.tp, pp=parallel.pp, dp=dp)
    mine = split_by_dp(work, grid)[dist.get_rank()]
    captured = {}
    step = trainer._optimizer.step

    def capture_then_step():
        # With the distributed optimizer each replica holds a shard of the reduced gradient: mean over replicas of
        # its own shard, so gather through the replicas before comparing.
        names = dict(zip(trainer.tensors(), (p for _, p in trainer.stage.named_parameters()), strict=True))
        captured.update({n: p.main_grad.detach().clone() for n, p in names.items()})
        return step()

    trainer._optimizer.step = capture_then_step
    stats = [trainer.train_step(mine) for _ in range(steps)]
    sink, grads = CollectingSink(), CollectingSink()
    config = WeightSyncConfig(strategy="gather_hf", bucket_bytes=20_000)
    pusher = WeightPusher(trainer, SyncSetup(config=config, outlets={0: Outlets(whole=(sink,))}))
    pusher.push()
    if not distributed or dp == 1:
        pusher.strategy.push(captured, Outlets(whole=(grads,)) if dist.get_rank() == 0 else Outlets())
    pusher.close()
    metrics = [None] * dist.get_world_size()
    dist.all_gather_object(metrics, [s.metrics for s in stats])
    return metrics[grid.output_rank(0)], sink.tensors, grads.tensors


def train(path, tmp_path, work, *, steps=1, dp=1, distributed=True, **parallel):
    config = ParallelConfig(**parallel)
    return run_ranks(train_on_rank, config.model_size * dp, tmp_path, path, config, distributed, dp, work, steps)


@pytest.fixture(scope="module")
def work():
    return make_work(make_trajectories(), policy_loss=GrpoConfig())


@pytest.fixture(scope="module")
def one_rank(qwen3_path, work, tmp_path_factory):
    return train(qwen3_path, tmp_path_factory.mktemp("one"), work, steps=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(layout, qwen3_path, work, one_rank, tmp_path):
    metrics, weights, grads = train(qwen3_path, tmp_path, work, steps=2, **LAYOUTS[layout])
    want_metrics, want_weights, want_grads = one_rank
    for step, (got, want) in enumerate(zip(metrics, want_metrics, strict=True)):
        for key in ("loss", "grad_norm", "entropy", "mismatch/logprob_abs_max"):
            assert got[key] == pytest.approx(want[key], rel=1e-4), (step, key)
    for name, grad in grads.items():
        assert (grad - want_grads[name]).abs().max() <= 1e-5 * want_grads[name].abs().max(), name
    for name, weight in weights.items():
        assert (weight - want_weights[name]).abs().max() <= 2e-5, name


def reference(path, trajectories, advantages=None):
    """transformers, one sequence at a time: log-probabilities, and gradients of the on-policy or NLL loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = sum(int(t.loss_mask.sum()) for t in trajectories)
    total = torch.zeros(())
    for i, t in enumerate(trajectories):
        ids = torch.from_numpy(t.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(t.loss_mask[1:])
        weight = 1.0 if advantages is None else advantages[i]
        # On-policy, the ratio is 1 and its gradient that of the log-probability.
        total = total - weight * logprobs[mask].sum() / tokens
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_path", "qwen2_tied_path"])
@pytest.mark.parametrize("loss", ["nll", "grpo"])
def test_loss_and_gradients_are_those_of_transformers(family, loss, request, tmp_path):
    path, trajectories = request.getfixturevalue(family), make_trajectories()
    work = make_work(trajectories, policy_loss=GrpoConfig() if loss == "grpo" else None)
    advantages = [s.advantage for s in work.mini_batches[0].samples]
    metrics, _, grads = train(path, tmp_path, work)
    want_loss, want_grads = reference(path, trajectories, advantages if loss == "grpo" else None)
    if loss == "nll":
        assert metrics[0]["loss"] == pytest.approx(want_loss, rel=1e-5)
    for name, grad in grads.items():
        assert (grad - want_grads[name]).abs().max() <= 1e-5 * want_grads[name].abs().max(), name


def test_tied_embeddings_over_pipeline_stages(qwen2_tied_path, work, tmp_path):
    want_metrics, _, want_grads = train(qwen2_tied_path, tmp_path, work)
    metrics, _, grads = train(qwen2_tied_path, tmp_path, work, pp=2)
    assert metrics[0]["grad_norm"] == pytest.approx(want_metrics[0]["grad_norm"], rel=1e-4)
    for name, grad in grads.items():
        assert (grad - want_grads[name]).abs().max() <= 1e-5 * want_grads[name].abs().max(), name


@pytest.mark.parametrize("max_tokens", [90, 10_000])
def test_micro_batch_size_changes_nothing(max_tokens, qwen3_path, one_rank, tmp_path):
    work = make_work(make_trajectories(), policy_loss=GrpoConfig(), max_tokens=max_tokens)
    metrics, _, _ = train(qwen3_path, tmp_path, work)
    assert metrics[0]["grad_norm"] == pytest.approx(one_rank[0][0]["grad_norm"], rel=1e-5)
    assert metrics[0]["loss"] == pytest.approx(one_rank[0][0]["loss"], rel=1e-5)
