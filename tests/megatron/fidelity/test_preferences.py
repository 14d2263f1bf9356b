"""Preference losses: value, metrics and gradients compared with transformers, on one rank and in all layouts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from megarl.batch.trajectory import Trajectory
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.data.preference_pairs import PreferencePair
from megarl.megatron.losses.preference import BradleyTerryLoss, DpoLoss
from megarl.megatron.request_split import split_by_dp, split_forward_by_dp
from megarl.megatron.requests import ModelSpec, TrainerSpec
from megarl.placement.rank_grid import RankGrid
from megarl.stages.pairwise import flatten_pairs, make_forward_request, make_pair_request
from tests.megatron.fidelity.measure import assemble, collect_gradients, worst_gradient
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import _gradients_on_disk, _load, _logprobs, score
from tests.megatron.ranks import run_ranks

NAME = "qwen2"
TOLERANCE = 1e-5
MAX_TOKENS = 150

LOSSES = {
    "reward": BradleyTerryLoss(kind="reward"),
    "cost": BradleyTerryLoss(kind="cost"),
    "cost with signs": BradleyTerryLoss(kind="cost"),
    "dpo": DpoLoss(beta=0.3),
    "rpo": DpoLoss(beta=0.3, nll=0.7),
}
LAYOUTS = [
    ("reward", {"world": 2, "cp": 2}),
    ("cost with signs", {"world": 2}),
    ("rpo", {"world": 2, "cp": 2}),
    ("dpo", {"world": 2, "tp": 2}),
]
OTHER_LAYOUTS = [
    (name, sizes)
    for name in LOSSES
    for sizes in ({"world": 2}, {"world": 2, "tp": 2}, {"world": 2, "cp": 2}, {"world": 2, "pp": 2})
    if (name, sizes) not in LAYOUTS
] + [("reward", {"world": 8, "tp": 2, "pp": 2, "cp": 2}), ("rpo", {"world": 8, "tp": 2, "cp": 2})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of one step on the pairs, and of a forward pass before it."""

    outputs: list[Any]
    """By answer: its score, or its log-probabilities, float32 [n]."""
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def make_pairs(seed: int = 0) -> list[PreferencePair]:
    """Make an odd number of pairs that fill several micro-batches, with all margins and signs."""
    rng = np.random.default_rng(seed)
    pairs = []
    for i in range(7):
        prompt = rng.integers(2, CONFIGS[NAME]["vocab_size"], int(rng.integers(1, 40)))
        chosen, rejected = (make_answer(rng, prompt, i) for _ in range(2))
        safe = (bool(i % 2), bool(i % 3))
        pairs.append(PreferencePair(chosen=chosen, rejected=rejected, margin=0.25 * (i % 3), safe=safe))
    return pairs


def make_answer(rng, prompt, number) -> Trajectory:
    answer = rng.integers(2, CONFIGS[NAME]["vocab_size"], int(rng.integers(1, 40)))
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Trajectory(
        prompt_id=str(number),
        group_id=number,
        token_ids=np.concatenate([prompt, answer]).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.full(len(mask), -1, np.int32),
    )


PAIRS = make_pairs()
REF_LOGPROBS = [
    np.random.default_rng(i).normal(-3, 1, answer.num_tokens).astype(np.float32)
    for i, answer in enumerate(flatten_pairs(PAIRS))
]
"""Random log-probabilities of a reference model."""


def pairs_for(name: str) -> list[PreferencePair]:
    return PAIRS if name == "cost with signs" else [replace(pair, safe=None) for pair in PAIRS]


def step(name: str, folder: str, tmp_path, *, world: int = 1, **parallel: Any) -> Step:
    head = "value" if isinstance(LOSSES[name], BradleyTerryLoss) else "lm"
    model = ModelSpec(model_path=folder, dtype="float32", parallel=ParallelConfig(**parallel), head=head)
    optimizer = OptimizerConfig(lr=1e-3, distributed=False)
    return run_ranks(
        step_on_rank, world, tmp_path, TrainerSpec(model=model, optimizer=optimizer, optimizer_steps=1), name
    )


def step_on_rank(spec: TrainerSpec, name: str) -> Step | None:
    import torch.distributed as dist

    from megarl.megatron.trainer_worker import TrainerWorker

    worker, rank = TrainerWorker(spec), dist.get_rank()
    grid = RankGrid.of(spec.model.parallel, dist.get_world_size())
    forward_request = split_forward_by_dp(make_forward_request(flatten_pairs(PAIRS), MAX_TOKENS), grid)[rank]
    outputs = worker.scores(forward_request) if spec.model.head == "value" else worker.logprobs(forward_request)
    gradients: dict[str, torch.Tensor] = {}
    prepare = worker._trainer._optimizer.prepare_grads

    def keep_gradients_then_prepare() -> Any:
        gradients.update(collect_gradients(worker._trainer))
        return prepare()

    worker._trainer._optimizer.prepare_grads = keep_gradients_then_prepare
    refs = None if spec.model.head == "value" else REF_LOGPROBS
    request = make_pair_request(pairs_for(name), LOSSES[name], max_tokens=MAX_TOKENS, ref_logprobs=refs)
    stats = worker.train_step(split_by_dp(request, grid)[rank])
    gathered: list[Any] = [None] * grid.size
    dist.all_gather_object(gathered, (outputs, stats.metrics, worker._model.layout, gradients))
    if rank != 0:
        return None
    merged = {key: value for each in gathered for key, value in each[0].items()}
    return Step(
        outputs=[merged[0, i] for i in range(2 * len(PAIRS))],
        metrics=gathered[grid.output_rank(0)][1],
        gradients=assemble([each[2] for each in gathered], [each[3] for each in gathered]),
    )


@functools.cache
def reference(name: str, folder: str) -> Step:
    """Compute the step with transformers, one answer at a time, by the papers' formulas."""
    loss = LOSSES[name]
    if isinstance(loss, BradleyTerryLoss):
        return scores_of_transformers(name, loss.kind, folder)
    model = _load(folder)
    losses, metrics = [], []
    for k, pair in enumerate(PAIRS):
        sums, rewards = [], []
        for i, answer in ((2 * k, pair.chosen), (2 * k + 1, pair.rejected)):
            counted = torch.from_numpy(answer.loss_mask[1:])
            sums.append(_logprobs(model, tuple(answer.token_ids.tolist()))[counted].sum())
            rewards.append(loss.beta * (sums[-1] - float(REF_LOGPROBS[i][answer.loss_mask].sum(dtype=np.float64))))
        nll = -sums[0] / int(pair.chosen.loss_mask.sum())
        losses.append(-logsigmoid(rewards[0] - rewards[1]) + loss.nll * nll)
        chosen, rejected = (float(reward.detach()) for reward in rewards)
        metrics.append(
            {
                "accuracy": float(chosen > rejected),
                "gap": chosen - rejected,
                "chosen_reward": chosen,
                "rejected_reward": rejected,
            }
        )
    total = torch.stack(losses).mean()
    total.backward()
    tokens = tuple(tuple(answer.token_ids.tolist()) for answer in flatten_pairs(PAIRS))
    return Step(
        outputs=list(score(folder, tokens)),
        metrics=average_metrics(metrics, total),
        gradients=_gradients_on_disk(model),
    )


def scores_of_transformers(name: str, kind: str, folder: str) -> Step:
    from transformers import AutoModelForSequenceClassification

    model = _load(folder, AutoModelForSequenceClassification)
    losses, metrics, outputs = [], [], []
    for pair in PAIRS:
        chosen_score, rejected_score = (
            model(torch.from_numpy(answer.token_ids).long()[None]).logits[0, 0]
            for answer in (pair.chosen, pair.rejected)
        )
        gap = chosen_score - rejected_score if kind == "reward" else rejected_score - chosen_score
        loss = -logsigmoid(gap - pair.margin)
        if name == "cost with signs":
            assert pair.safe is not None
            for cost, safe in zip((chosen_score, rejected_score), pair.safe, strict=True):
                loss = loss - logsigmoid(-cost if safe else cost)
        losses.append(loss)
        outputs += [float(chosen_score.detach()), float(rejected_score.detach())]
        mean = float((chosen_score + rejected_score).detach()) / 2
        metrics.append({"accuracy": float(gap > 0), "gap": float(gap.detach()), "score": mean})
    total = torch.stack(losses).mean()
    total.backward()
    return Step(outputs=outputs, metrics=average_metrics(metrics, total), gradients=_gradients_on_disk(model))


def average_metrics(metrics: list[dict[str, float]], loss: torch.Tensor) -> dict[str, float]:
    return {"loss": float(loss)} | {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]}


def check(name: str, folder: str, got: Step) -> None:
    want = reference(name, folder)
    for answer, actual_output, expected_output in zip(flatten_pairs(PAIRS), got.outputs, want.outputs, strict=True):
        if isinstance(expected_output, float):
            assert actual_output == pytest.approx(expected_output, abs=TOLERANCE)
        else:
            sampled = torch.from_numpy(answer.loss_mask[1:])  # only these reach the language head
            actual = torch.from_numpy(actual_output[1:])
            torch.testing.assert_close(actual[sampled], expected_output[sampled], rtol=0, atol=TOLERANCE)
    for metric, value in want.metrics.items():
        assert got.metrics[metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric
    assert got.gradients.keys() == want.gradients.keys()
    difference, tensor = worst_gradient(got.gradients, want.gradients)
    assert difference <= TOLERANCE, tensor
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in want.gradients.values()))
    assert got.metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def folder_for(name: str, model_folder, value_folder) -> str:
    return value_folder(NAME) if isinstance(LOSSES[name], BradleyTerryLoss) else model_folder(NAME)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_metrics_and_gradients_match_transformers(name, model_folder, value_folder, tmp_path):
    folder = folder_for(name, model_folder, value_folder)
    check(name, folder, step(name, folder, tmp_path))


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_layouts_match_one_rank(name, sizes, model_folder, value_folder, tmp_path):
    folder = folder_for(name, model_folder, value_folder)
    check(name, folder, step(name, folder, tmp_path, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), OTHER_LAYOUTS, ids=str)
def test_remaining_layouts_match_one_rank(name, sizes, model_folder, value_folder, tmp_path):
    folder = folder_for(name, model_folder, value_folder)
    check(name, folder, step(name, folder, tmp_path, **sizes))
