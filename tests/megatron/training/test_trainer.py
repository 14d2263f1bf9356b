"""Training steps of RL: policy loss, mini-batches, metrics, clipping, weight sync after the step, load of experts."""

import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.batch.pack import SampleRef
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.algorithm import GrpoConfig
from megarl.config.megatron import MoeConfig
from megarl.functional.losses import Denominators
from megarl.losses import ClippedLoss, PolicyLoss
from megarl.megatron.requests import MiniBatch, TrainRequest, VersionRange
from megarl.megatron.trainer_worker import TrainerWorker
from tests.megatron import rank_models
from tests.megatron.fidelity.measure import as_trajectory, gradient_norm
from tests.megatron.fidelity.reference import _load, score
from tests.megatron.rank_models import gather, gather_full, model_spec, sync_weights, train_step, trainer_spec
from tests.megatron.ranks import run_ranks, sample

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "pp2 vpp2": {"pp": 2, "vpp": 2}, "cp2": {"cp": 2}, "dp2": {}}


def make_trajectories(count=24, vocab=331, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(2, 90))
        mask = np.zeros(n, bool)
        mask[int(rng.integers(1, n)) :] = True
        if n > 12:
            mask[n // 2 + 2] = False  # not sampled, as tool output
        out.append(as_trajectory(rng.integers(2, vocab, n), mask, number=i, logprob=-5.0))
    return out


TRAJECTORIES = make_trajectories()
ADVANTAGES = tuple(np.random.default_rng(1).normal(size=len(TRAJECTORIES)).tolist())
TOKENS = tuple(tuple(t.token_ids.tolist()) for t in TRAJECTORIES)
MASKS = tuple(tuple(t.loss_mask.tolist()) for t in TRAJECTORIES)
ALL_INDICES = range(len(TRAJECTORIES))
HALVES = (range(12), range(12, 24))


def make_request(*mini_batches, max_tokens=256, advantages=ADVANTAGES):
    """Request one optimizer step per mini-batch, given as indices into TRAJECTORIES."""
    token_loss = ClippedLoss.of(GrpoConfig())
    return TrainRequest(
        mini_batches=tuple(mini_batch(indices, advantages) for indices in mini_batches),
        payloads=(LocalPayload(TRAJECTORIES),),
        max_tokens_per_micro_batch=max_tokens,
        loss=PolicyLoss(token_loss=token_loss, algorithm=GrpoConfig(kl_loss=None), length_norm=1),
    )


def mini_batch(indices, advantages):
    count = Denominators(num_tokens=sum(sum(MASKS[i]) for i in indices), num_sequences=len(indices))
    samples = (
        SampleRef(payload=0, index=i, num_tokens=len(TOKENS[i]), scalars={"advantages": advantages[i]}) for i in indices
    )
    return MiniBatch(samples=tuple(samples), denominators=count)


def train_on_rank(spec, request):
    """Run one training step; returns metrics, gradients of each optimizer step, and the weights synced afterwards."""
    worker = TrainerWorker(spec)
    recorded = rank_models.record_gradients(worker.trainer)
    metrics = train_step(worker, request)
    return metrics, [gather_full(worker.model, gradients) for gradients in recorded], sync_weights(worker)


@pytest.fixture
def train(path, tmp_path):
    def run(request, *, world=1, lr=1e-3, eps=1e-8, clip_grad=1.0, **parallel):
        # replicated, because with the distributed optimizer each rank has the reduced gradient of its shard only
        spec = trainer_spec(model_spec(path, parallel), lr=lr, eps=eps, clip_grad=clip_grad, distributed=False)
        return run_ranks(train_on_rank, world, tmp_path, spec, request)

    return run


@cache
def logprobs_of(folder, indices):
    """Return the log-probability and the advantage of every token in the loss mask of these trajectories."""
    scores = score(folder, TOKENS)
    masks = [torch.tensor(MASKS[i][1:]) for i in indices]
    return (
        torch.cat([scores[i][mask] for i, mask in zip(indices, masks, strict=True)]),
        torch.cat([torch.full((int(mask.sum()),), ADVANTAGES[i]) for i, mask in zip(indices, masks, strict=True)]),
    )


def test_grad_norm_metric_is_measured_before_clipping(train):
    metrics, (gradients,), _ = train(make_request(ALL_INDICES), clip_grad=0.01)
    norm = gradient_norm(gradients)
    assert norm > 0.1
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("clip_grad", [0.0, 0.05, 1e3])
def test_gradients_are_clipped_to_the_configured_norm(clip_grad, train, path):
    # With a large epsilon, Adam's first step is lr / eps * gradient.
    metrics, (gradients,), weights = train(make_request(ALL_INDICES), lr=100.0, eps=1e3, clip_grad=clip_grad)
    scale = min(1.0, clip_grad / metrics["grad_norm"]) if clip_grad else 1.0
    disk = load_file(f"{path}/model.safetensors")
    for name, gradient in gradients.items():
        step = (disk[name] - weights[name]) / (0.1 * scale)
        assert (step - gradient).abs().max() < 0.01 * gradient.abs().max() + 1e-6 / scale, name


def test_later_mini_batches_use_logprobs_from_before_the_first_update(train, path, tmp_path):
    _, _, after_first = train(make_request(HALVES[0]))
    moved = tmp_path / "moved"
    shutil.copytree(path, moved)
    save_file(after_first, moved / "model.safetensors", metadata={"format": "pt"})
    metrics, _, _ = train(make_request(*HALVES))
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


def test_mismatch_metrics_compare_with_the_engine_logprobs(train, path):
    metrics, _, _ = train(make_request(*HALVES))
    # mismatch is measured before the first update; the engine log-probabilities are -5
    differences = [logprobs_of(path, half)[0] + 5.0 for half in HALVES]
    expected = {
        "train_infer_mismatch/logprob_abs_max": max(float(d.abs().max()) for d in differences),
        "train_infer_mismatch/logprob_abs_mean": sum(float(d.abs().mean()) for d in differences) / 2,
        "train_infer_mismatch/kl": sum(float((d.exp() - 1 - d).mean()) for d in differences) / 2,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    quantile = np.quantile(torch.cat(differences).abs().numpy(), 0.99, method="inverted_cdf")
    assert quantile <= metrics["train_infer_mismatch/logprob_abs_p99"] <= 1.1 * quantile


def measure_mismatch(gap, is_current):
    """Return the metrics of a trajectory of five sampled tokens, one of whose log-probabilities differs by `gap`."""
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.batch.pack import pack
    from megarl.megatron.training.metric_sums import MetricSums, read_metrics
    from megarl.megatron.training.trainer import add_mismatch_metrics

    trajectory = as_trajectory(range(2, 8), logprob=-1.0)
    old, version = np.full(6, -1.0, np.float32), np.full(6, 3.0 if is_current else 2.0, np.float32)
    old[2] += gap
    batch = mini_batch(range(1), ADVANTAGES)
    batch = replace(batch, denominators=Denominators(num_tokens=5, num_sequences=1))
    versions = VersionRange(current=3, oldest=0, num_current_tokens=5 if is_current else 0)
    request, metrics = replace(make_request(range(1)), versions=versions), MetricSums()
    columns = {"old_logprobs": [old], "policy_versions": [version]}
    add_mismatch_metrics(pack([trajectory], columns), batch, request, metrics)
    torch.distributed.init_process_group("gloo")
    return read_metrics(metrics.reduce(torch.distributed.group.WORLD))


@pytest.mark.parametrize("is_current", [True, False])
@pytest.mark.parametrize("gap", [-1e4, 100.0, 1e4])
def test_mismatch_of_a_broken_token_is_finite(gap, is_current, tmp_path):
    """The exponential of one log-ratio would make means of all tokens infinite; losses clamp it."""
    metrics = run_ranks(measure_mismatch, 1, tmp_path, gap, is_current)
    metrics.pop("train_infer_mismatch/logprob_abs_p99", None)  # of a histogram, infinite above its last edge
    assert np.isfinite(list(metrics.values())).all(), metrics
    ratio = np.exp(np.clip(gap, -20, 20))
    assert metrics["drift/ratio_mean"] == pytest.approx((4 + ratio) / 5, rel=1e-5)
    assert metrics["drift/ratio_square_mean"] == pytest.approx((4 + ratio**2) / 5, rel=1e-5)
    kind = "train_infer_mismatch" if is_current else "drift"
    assert metrics[f"{kind}/kl"] == pytest.approx((ratio - 1 - np.clip(gap, -20, 20)) / 5, rel=1e-5)
    assert metrics[f"{kind}/logprob_abs_mean"] == pytest.approx(abs(gap) / 5)


@pytest.fixture(scope="module")
def one_rank(path, tmp_path_factory):
    spec = trainer_spec(model_spec(path), lr=1e-4, distributed=False)
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(train_on_rank, 1, folder, spec, make_request(*HALVES))


def assert_same_step(got, want):
    for name, value in want[0].items():
        assert got[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert got[2].keys() == want[2].keys()
    for name, weight in want[2].items():
        assert (got[2][name] - weight).abs().max() <= 2e-5, name


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["pp2 vpp2", "cp2", "dp2"]))
def test_metrics_and_synced_weights_match_one_rank(layout, train, one_rank):
    assert_same_step(train(make_request(*HALVES), world=2, lr=1e-4, **LAYOUTS[layout]), one_rank)


@pytest.mark.parametrize("max_tokens", [90, 10_000])
def test_micro_batch_size_does_not_change_results(max_tokens, train, one_rank):
    request = replace(make_request(*HALVES), max_tokens_per_micro_batch=max_tokens)
    assert_same_step(train(request, lr=1e-4), one_rank)


LAYERS, EXPERTS, TOP_K = 3, 8, 2
"""Of the tiny Qwen3-MoE model: layers with experts (one has none), experts, and experts per token."""


def train_experts_on_rank(model, request, distributed):
    """Take one training step; returns metrics, the step's gradients, weights before and after it, and stored keys."""
    trainer = rank_models.make_trainer(trainer_spec(model, lr=1e-3, weight_decay=0.1, distributed=distributed))
    from megarl.megatron.checkpoint.optimizer_state import collect_optimizer_shards
    from megarl.megatron.checkpoint.shards import shards_to_save

    before = {name: tensor.detach().clone() for name, tensor in trainer.model.tensors().items()}
    recorded = rank_models.record_gradients(trainer) if not model.moe.freeze_router else []
    metrics = train_step(trainer, request)
    stored = {s.key for s in shards_to_save(trainer.model, collect_optimizer_shards(trainer.optimizer))}
    after = {name: tensor.detach() for name, tensor in trainer.model.tensors().items()}
    full = gather_full(trainer.model, recorded[0]) if recorded else {}
    return metrics, full, before, after, set.union(*gather(stored))


def count_tokens(path, sequences=TOKENS):
    """Return the tokens that transformers routes to each expert of each layer, int64 [LAYERS, EXPERTS]."""
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    model = _load(path)
    for tokens in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        for layer, logits_TE in enumerate(logits):
            counts[layer] += logits_TE.topk(TOP_K).indices.flatten().bincount(minlength=EXPERTS)
    return counts


def assert_load(metrics, counts):
    ratios = counts.amax(1) / counts.mean(1)
    assert metrics["expert_load/max_over_mean"] == pytest.approx(float(ratios.mean()))
    assert metrics["expert_load/max_over_mean_max"] == pytest.approx(float(ratios.max()))
    assert metrics["expert_load/unused"] == float((counts == 0).double().mean())


def test_load_of_experts_is_counted_and_frozen_routers_stay(model_folder, tmp_path):
    path = model_folder("qwen3_moe")
    spec = model_spec(path, {"ep": 2}, moe=MoeConfig(freeze_router=True))
    request = make_request(ALL_INDICES)
    metrics, _, before, after, stored = run_ranks(train_experts_on_rank, 2, tmp_path, spec, request, True)
    counts = count_tokens(path).double()
    assert int(counts.sum()) == LAYERS * TOP_K * sum(map(len, TOKENS))
    assert_load(metrics, counts)
    unchanged = {name for name, tensor in after.items() if torch.equal(before[name], tensor)}
    assert unchanged == {name for name in after if name.endswith("mlp.router.weight")}
    assert len(unchanged) == LAYERS
    assert any(key.endswith("mlp.router.weight") and not key.startswith("optimizer.") for key in stored)
    assert not any(key.startswith("optimizer.") and "router" in key for key in stored)


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["cp2", "pp2 vpp2"]))
def test_padding_is_no_load_of_experts(layout, model_folder, tmp_path):
    """Padding aligns the sequence of 81 tokens; the interleaved schedule and idle replicas compute packs of padding."""
    path, request = model_folder("qwen3_moe"), make_request(range(2, 3))
    spec = model_spec(path, LAYOUTS[layout])
    metrics = run_ranks(train_experts_on_rank, 2, tmp_path, spec, request, False)[0]
    counts = count_tokens(path, TOKENS[2:3]).double()
    assert_load(metrics, counts)


def test_gradient_of_the_load_balancing_loss_is_that_of_transformers(model_folder, tmp_path):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    path, request = model_folder("qwen3_moe"), make_request(range(3), max_tokens=4096)
    specs = [model_spec(path, moe=MoeConfig(aux_loss_coeff=coefficient)) for coefficient in (1.0, 0.0)]
    with_loss, without = (run_ranks(train_experts_on_rank, 1, tmp_path, spec, request, False)[1] for spec in specs)
    model = _load(path)
    logits = [model(torch.tensor([tokens]), output_router_logits=True).router_logits for tokens in TOKENS[:3]]
    # transformers averages over layers, and counts the experts of a token one by one
    loss = sum(load_balancing_loss_func((torch.cat(layer),), EXPERTS, TOP_K) for layer in zip(*logits, strict=True))
    (loss / TOP_K).backward()
    routed = {number: layer for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    assert len(routed) == LAYERS
    for number, layer in routed.items():
        name = f"model.layers.{number}.mlp.gate.weight"
        got, want = with_loss[name] - without[name], layer.mlp.gate.weight.grad
        assert float(want.abs().max()) > 1e-3
        assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max()) + 1e-6, name
