"""Every loss: against transformers and the papers' formulas, and in every layout against one rank.

Formulas are written out one trajectory at a time. Legend: n tokens of a trajectory, K of them sampled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.batch.trajectory import Trajectory
from megarl.config.algorithms.algorithm import (
    CispoConfig,
    CorrectionConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    KlConfig,
)
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.functional.losses import Denominators
from megarl.megatron.requests import (
    DirectPreferenceLoss,
    EvaluationWork,
    ImplicitRewardLoss,
    LikelihoodLoss,
    Loss,
    MiniBatch,
    ModelSpec,
    PairLoss,
    ReturnsLoss,
    SampleRef,
    SurrogateLoss,
    TrainerSpec,
    TrainWork,
    split_by_dp,
    split_evaluation,
)
from megarl.placement.rank_grid import RankGrid
from megarl.workers.payload import LocalPayload
from tests.megatron.fidelity.measure import assemble, collect_gradients, worst_gradient
from tests.megatron.fidelity.reference import _load, _logprobs
from tests.megatron.ranks import run_ranks

TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5
"""Of a tensor's largest gradient: where two answers' cancel, another order of addition shows."""
LENGTHS = (2, 34, 90, 5, 21, 13, 55, 3, 8, 47, 17, 30)
NOTHING_SAMPLED = 5
"""Which trajectory has no sampled token."""
MAX_TOKENS = 110
LENGTH_NORM = 40
COUNT = len(LENGTHS)

LAYOUTS = {"dp2": {}, "cp2": {"cp": 2}, "tp2": {"tp": 2}}
OTHER_LAYOUTS = {"pp2": {"pp": 2}, "pp2 vpp2": {"pp": 2, "vpp": 2}, "dp2 tp2 cp2": {"tp": 2, "cp": 2}}


def make_trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    out = []
    for i, n in enumerate(LENGTHS):
        mask = np.zeros(n, bool)
        if i != NOTHING_SAMPLED:
            mask[int(rng.integers(1, n // 3 + 2)) :] = True
        if n > 12:
            mask[n // 2 + 2 : n // 2 + 4] = False  # as a tool's answer leaves it
        if n == 21:
            mask[-2:] = False  # it ends with one
        out.append(
            Trajectory(
                prompt_id=str(i),
                group_id=i // 2,
                token_ids=rng.integers(2, 331, n).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return out


TRAJECTORIES = make_trajectories()
TOKENS = tuple(tuple(t.token_ids.tolist()) for t in TRAJECTORIES)
SAMPLED = [torch.from_numpy(t.loss_mask[1:]) for t in TRAJECTORIES]
NUM_TOKENS = sum(int(mask.sum()) for mask in SAMPLED)


def draw(seed: int, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.normal(size=n)).astype(np.float32) for n in LENGTHS]


SCALARS: dict[str, list[float]] = {
    "advantages": np.random.default_rng(1).normal(size=COUNT).round(3).tolist(),
    "positive": [float(i % 3 == 0) for i in range(COUNT)],
    "margins": [0.25 * (i // 2 % 3) for i in range(COUNT)],
    "signs": [1.0 if i % 3 else -1.0 for i in range(COUNT)],
    "outcomes": [float(i % 4 < 2) for i in range(COUNT)],
}
NUM_POSITIVE_TOKENS = sum(int(mask.sum()) for mask, p in zip(SAMPLED, SCALARS["positive"], strict=True) if p)

COLUMNS = {"advantages": draw(2), "values": draw(5, 0.5), "returns": draw(6)}


@dataclass(frozen=True, kw_only=True)
class Case:
    loss: Loss
    columns: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    together: int = 1

    @property
    def head(self) -> str:
        return "value" if isinstance(self.loss, ReturnsLoss | PairLoss) else "lm"


def surrogate(algorithm: Any, *columns: str, nll: float = 0.0, old: bool = True) -> Case:
    """With an advantage a token where `columns` have them, else one a trajectory."""
    return Case(
        loss=SurrogateLoss(algorithm=algorithm, length_norm=LENGTH_NORM, nll=nll),
        columns=(*columns, *(["old_logprobs"] if old else [])),
        scalars=(*([] if "advantages" in columns else ["advantages"]), *(["positive"] if nll else [])),
    )


def grpo(**fields: Any) -> GrpoConfig:
    return GrpoConfig(**{"kl_loss": None, **fields})


CORRECTIONS = {
    "token_tis": CorrectionConfig(kind="token_tis", high=1.1),
    "sequence_tis": CorrectionConfig(kind="sequence_tis", high=1.5),
    "icepop": CorrectionConfig(kind="icepop", low=0.9, high=1.1),
    "geometric_mask": CorrectionConfig(kind="geometric_mask", low=0.97, high=1.03),
}
GSPO = {"clip_low": 0.03, "clip_high": 0.05}
CASES = {
    "likelihood": Case(loss=LikelihoodLoss()),
    "clip": surrogate(grpo(clip_high=0.28, dual_clip=1.5)),
    "clip of tokens": surrogate(grpo(), "advantages"),
    "on policy": surrogate(grpo(), old=False),
    **{
        f"kl {kind}": surrogate(grpo(kl_loss=KlConfig(kind=kind, coefficient=0.3)), "ref_logprobs")
        for kind in ("k1", "k2", "k3")
    },
    **{name: surrogate(grpo(correction=correction)) for name, correction in CORRECTIONS.items()},
    **{
        mode: surrogate(grpo(aggregation=mode))
        for mode in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    "gspo": surrogate(GspoConfig(**GSPO)),
    "cispo": surrogate(CispoConfig(clip_high=0.2), "advantages"),
    "gmpo": surrogate(GmpoConfig(clip_low=0.3, clip_high=0.2)),
    "nll": surrogate(grpo(), nll=0.4),
    "everything": surrogate(
        GspoConfig(**GSPO, kl_loss=KlConfig(coefficient=0.3), correction=CORRECTIONS["sequence_tis"]),
        "ref_logprobs",
        nll=0.4,
    ),
    "returns": Case(loss=ReturnsLoss(clip=None), columns=("values", "returns")),
    "clipped returns": Case(loss=ReturnsLoss(clip=0.5), columns=("values", "returns")),
    "reward pairs": Case(loss=PairLoss(kind="reward"), scalars=("margins",), together=2),
    "cost pairs": Case(loss=PairLoss(kind="cost"), scalars=("margins", "signs"), together=2),
    "dpo": Case(loss=DirectPreferenceLoss(beta=0.3), columns=("ref_logprobs",), together=2),
    "rpo": Case(loss=DirectPreferenceLoss(beta=0.3, nll=0.7), columns=("ref_logprobs",), together=2),
    "implicit reward": Case(loss=ImplicitRewardLoss(beta=0.2), columns=("ref_logprobs",), scalars=("outcomes",)),
}

EVALUATED = "clip, old log-probabilities evaluated before"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a first step found, before it changed anything."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Measured:
    steps: dict[str, Step]
    logprobs: dict[int, np.ndarray]
    values: dict[int, np.ndarray]
    scores: dict[int, float]
    answers: list[bool]
    """By rank: whether it answered evaluations."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The trajectories as the engine gave them, and what a loss may be given of them."""

    trajectories: list[Trajectory]
    columns: Mapping[str, list[np.ndarray]] = field(default_factory=dict)


def make_work(case: Case, data: Data) -> TrainWork:
    parts = {
        name: [{(0, i): data.columns[name][i] for i in of} for of in (range(0, COUNT, 2), range(1, COUNT, 2))]
        for name in case.columns
    }
    count = Denominators(num_tokens=NUM_TOKENS, num_sequences=COUNT, num_positive_tokens=NUM_POSITIVE_TOKENS)
    return TrainWork(
        mini_batches=(
            MiniBatch(
                samples=tuple(
                    SampleRef(
                        payload=0,
                        index=i,
                        num_tokens=n,
                        scalars={name: SCALARS[name][i] for name in case.scalars},
                    )
                    for i, n in enumerate(LENGTHS)
                ),
                denominators=count,
            ),
        ),
        payloads=(LocalPayload(data.trajectories),),
        max_tokens_per_micro_batch=MAX_TOKENS,
        loss=case.loss,
        columns={name: LocalPayload(column) for name, column in parts.items()},
        together=case.together,
    )


def measure_on_rank(folders: Mapping[str, str], parallel: ParallelConfig, data: Data, names: list[str]) -> Any:
    import torch.distributed as dist

    from megarl.megatron.trainer_worker import TrainerWorker

    grid, rank = RankGrid.of(parallel, int(os.environ["WORLD_SIZE"])), int(os.environ["RANK"])
    workers = {}
    for head, folder in folders.items():
        model = ModelSpec(model_path=folder, dtype="float32", parallel=parallel, head=head)
        optimizer = OptimizerConfig(distributed=False)
        workers[head] = TrainerWorker(TrainerSpec(model=model, optimizer=optimizer, optimizer_steps=1))
    evaluation = EvaluationWork(
        samples=tuple(SampleRef(payload=0, index=i, num_tokens=n) for i, n in enumerate(LENGTHS)),
        payloads=(LocalPayload(data.trajectories),),
        max_tokens_per_micro_batch=MAX_TOKENS,
    )
    mine = split_evaluation(evaluation, grid)[rank]
    evaluated = (workers["lm"].logprobs(mine), workers["value"].values(mine), workers["value"].scores(mine))
    all_evaluated: list[Any] = [None] * grid.size
    dist.all_gather_object(all_evaluated, evaluated)
    logprobs, values, scores = ({k[1]: v for each in all_evaluated for k, v in each[i].items()} for i in range(3))

    def step(name: str, given: Data) -> tuple[dict[str, float], dict[str, Tensor]]:
        return step_on_rank(workers[CASES[name].head], split_by_dp(make_work(CASES[name], given), grid)[rank])

    steps = {name: step(name, data) for name in names}
    if names:
        columns = {**data.columns, "old_logprobs": [logprobs[i] for i in range(COUNT)]}
        steps[EVALUATED] = step("clip", replace(data, columns=columns))
    layouts = {head: worker._rank.layout for head, worker in workers.items()}
    everyone: list[Any] = [None] * grid.size
    dist.all_gather_object(everyone, (steps, layouts))
    if rank:
        return None
    measured = {}
    for name in steps:
        head = CASES[name].head if name in CASES else "lm"
        parts = [of_rank[name][1] for of_rank, _ in everyone]
        measured[name] = Step(
            metrics=everyone[grid.output_rank(0)][0][name][0],
            gradients=assemble([layouts[head] for _, layouts in everyone], parts),
        )
    answers = [any(each) for each in all_evaluated]
    return Measured(steps=measured, logprobs=logprobs, values=values, scores=scores, answers=answers)


def step_on_rank(worker: Any, work: TrainWork) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Its metrics, and this rank's part of the gradient; the weights stay as they are."""
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> bool:
        gradients.update(collect_gradients(worker._trainer))
        return False

    worker._trainer._optimizer.prepare_grads = keep_gradients
    worker._trainer._optimizer.step_with_ready_grads = lambda: True
    (batch,) = work.mini_batches
    assert len(batch.micro_batches) > 1
    stats = worker.train_step(work)
    return {k: v for k, v in stats.metrics.items() if not k.startswith(("grad_norm", "learning_rate"))}, gradients


@pytest.fixture(scope="module")
def folders(model_folder: Any, value_folder: Any) -> dict[str, str]:
    return {"lm": model_folder("qwen3"), "value": value_folder("qwen2")}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What transformers says of the trajectories, differentiable, and all that it follows from."""

    outputs: list[Tensor]
    """Of a language model [n - 1] log-probabilities of tokens 1 on; of a value model [n] values."""
    parameters: dict[str, Tensor]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True, materialize_grads=True)
        return dict(zip(self.parameters, found, strict=True))


@cache
def graph(folder: str, head: str) -> Graph:
    from transformers import AutoModelForSequenceClassification

    if head == "lm":
        model = _load(folder)
        outputs = [_logprobs(model, tokens) for tokens in TOKENS]
    else:
        model = _load(folder, AutoModelForSequenceClassification)
        hidden = (model.model(torch.tensor(tokens)[None], use_cache=False).last_hidden_state for tokens in TOKENS)
        outputs = [model.score(each)[0, :, 0] for each in hidden]
    return Graph(outputs=outputs, parameters=dict(model.named_parameters()))


@pytest.fixture(scope="module")
def data(folders: dict[str, str]) -> Data:
    """The policy was a little different when it sampled, and the engine a little different from the policy."""
    exact = [np.append(0.0, lp.detach().numpy()) for lp in graph(folders["lm"], "lm").outputs]
    old, ref = ([(x + d).astype(np.float32) for x, d in zip(exact, draw(s, 0.3), strict=True)] for s in (3, 4))
    rollout = [np.where(t.loss_mask, x + d, 0.0) for t, x, d in zip(TRAJECTORIES, old, draw(7, 0.15), strict=True)]
    return Data(
        trajectories=[replace(t, logprobs=x.astype(np.float32)) for t, x in zip(TRAJECTORIES, rollout, strict=True)],
        columns=COLUMNS | {"old_logprobs": old, "ref_logprobs": ref},
    )


Measure = Callable[..., Measured]


@pytest.fixture(scope="module")
def measure(folders: dict[str, str], data: Data, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """By layout, once."""

    @cache
    def run(world: int = 1, names: tuple[str, ...] = tuple(CASES), **parallel: int) -> Measured:
        folder = tmp_path_factory.mktemp("ranks")
        return run_ranks(measure_on_rank, world, folder, folders, ParallelConfig(**parallel), data, list(names))

    return run


def of_sampled(values: list[np.ndarray], i: int) -> Tensor:
    """[K]"""
    return torch.from_numpy(values[i][1:])[SAMPLED[i]]


def surrogate_of_one(algorithm: Any, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """[K] losses."""
    ratio = (logprobs - old).exp()
    match algorithm.type:
        case "grpo":
            gain = torch.minimum(
                advantages * ratio, advantages * ratio.clip(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            )
            if algorithm.dual_clip:
                gain = torch.where(advantages < 0, torch.maximum(gain, algorithm.dual_clip * advantages), gain)
            return -gain
        case "gspo":  # the objective itself, arXiv 2507.18071, equation 5
            whole = (logprobs - old).mean().exp()
            bounded = whole.clip(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            return -torch.minimum(advantages * whole, advantages * bounded)
        case "cispo":
            return -ratio.detach().clip(max=1 + algorithm.clip_high) * advantages * logprobs
        case "gmpo":
            sign, log_ratio = advantages[0].sign(), logprobs - old  # arXiv 2507.20673, equation 4
            kept = torch.minimum(sign * log_ratio, sign * log_ratio.clip(-algorithm.clip_low, algorithm.clip_high))
            return -advantages * (sign * kept).mean().exp()


def weights_of_one(correction: CorrectionConfig, old: Tensor, rollout: Tensor) -> Tensor:
    """[K]"""
    ratio, (low, high) = (old - rollout).exp(), correction.bounds
    match correction.kind:
        case "token_tis":
            return ratio.clip(max=high)
        case "sequence_tis":
            return ratio.prod().clip(max=high).expand(len(ratio))
        case "icepop":
            return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        case "geometric_mask":
            mean = ratio.prod() ** (1 / len(ratio))
            return torch.full_like(ratio, float(low <= mean <= high))


def reference_of_surrogate(case: Case, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    loss: Any = case.loss
    algorithm, total = loss.algorithm, torch.zeros(())
    token_sums: dict[str, float] = {}
    largest, likelihood = 0.0, torch.zeros(())
    for i in range(COUNT):
        if i == NOTHING_SAMPLED:
            continue
        logprobs = outputs[i][SAMPLED[i]]
        old = of_sampled(data.columns["old_logprobs"], i) if "old_logprobs" in case.columns else logprobs.detach()
        if "advantages" in case.columns:
            advantages = of_sampled(data.columns["advantages"], i)
        else:
            advantages = torch.full_like(old, SCALARS["advantages"][i])
        losses = surrogate_of_one(algorithm, logprobs, old, advantages)
        ratio = (logprobs - old).detach().exp()
        if algorithm.type in ("gspo", "gmpo"):
            ratio = (ratio.prod() ** (1 / len(ratio))).expand(len(ratio))
        found = {"policy/ratio": ratio, "policy/kl_old": (old - logprobs).detach()}
        if algorithm.correction is not None:
            weights = weights_of_one(algorithm.correction, old, of_sampled([t.logprobs for t in data.trajectories], i))
            losses = losses * weights
            found |= {"correction/weight": weights, "correction/kept": (weights > 0).float()}
        if algorithm.kl_loss is not None:
            d = logprobs - of_sampled(data.columns["ref_logprobs"], i)
            kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[algorithm.kl_loss.kind]
            losses = losses + algorithm.kl_loss.coefficient * kl
            found["policy/kl_reference"] = kl.detach()
        match algorithm.aggregation:
            case "token-mean":
                total = total + losses.sum() / NUM_TOKENS
            case "seq-mean-token-sum":
                total = total + losses.sum() / COUNT
            case "seq-mean-token-mean":
                total = total + losses.mean() / COUNT
            case "seq-mean-token-sum-norm":
                total = total + losses.sum() / LENGTH_NORM / COUNT
        if loss.nll and SCALARS["positive"][i]:
            likelihood = likelihood - logprobs.sum() / NUM_POSITIVE_TOKENS
        largest = max(largest, float(ratio.max()))
        for name, values in found.items():
            token_sums[name] = token_sums.get(name, 0.0) + float(values.sum())
    metrics = {name: value / NUM_TOKENS for name, value in token_sums.items()} | {"policy/ratio_max": largest}
    if loss.nll:
        metrics["policy/positive_nll"] = float(likelihood.detach())
    return total + loss.nll * likelihood, metrics


def reference_of_returns(clip: float | None, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    losses, values = [], []
    for i in range(COUNT):
        before = outputs[i][:-1][SAMPLED[i]]  # a token's value is that of what stands before it
        old, returns = (of_sampled(data.columns[name], i) for name in ("values", "returns"))
        squares = (before - returns) ** 2
        if clip is not None:
            squares = torch.maximum(squares, (old + (before - old).clip(-clip, clip) - returns) ** 2)
        losses.append(squares / 2)
        values.append(before.detach())
    return torch.cat(losses).sum() / NUM_TOKENS, {"values": float(torch.cat(values).sum() / NUM_TOKENS)}


def reference_of_implicit_reward(beta: float, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    losses, right = [], []
    for i in range(COUNT):
        if i == NOTHING_SAMPLED:
            continue
        outcome = SCALARS["outcomes"][i]
        logit = beta * (outputs[i][SAMPLED[i]] - of_sampled(data.columns["ref_logprobs"], i)).sum()
        probability = logit.sigmoid()
        losses.append(-(outcome * probability.log() + (1 - outcome) * (1 - probability).log()))
        right.append((float(probability) > 0.5) == bool(outcome))
    # of what was not sampled the reward is 0, which is no success
    right.append(not SCALARS["outcomes"][NOTHING_SAMPLED])
    return torch.stack(losses).sum() / COUNT, {"accuracy": sum(right) / COUNT}


def reference(case: Case, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    match case.loss:
        case SurrogateLoss():
            return reference_of_surrogate(case, data, outputs)
        case ReturnsLoss(clip=clip):
            return reference_of_returns(clip, data, outputs)
        case ImplicitRewardLoss(beta=beta):
            return reference_of_implicit_reward(beta, data, outputs)
    raise AssertionError(case)


WITH_REFERENCE = [
    name for name, case in CASES.items() if isinstance(case.loss, SurrogateLoss | ReturnsLoss | ImplicitRewardLoss)
]


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_loss_metrics_and_gradients_are_those_of_transformers(
    name: str, measure: Measure, data: Data, folders: dict[str, str]
) -> None:
    case, got = CASES[name], measure().steps[name]
    of = graph(folders[case.head], case.head)
    loss, metrics = reference(case, data, of.outputs)
    for metric, value in ({"loss": float(loss.detach())} | metrics).items():
        assert got.metrics[metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric
    assert_same_gradients(got.gradients, of.gradients(loss))


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert max(float(gradient.abs().max()) for gradient in want.values()) > 1e-3
    difference, tensor = worst_gradient(got, want)
    assert difference <= GRADIENT_TOLERANCE, tensor


def assert_same_step(got: Step, want: Step) -> None:
    assert got.metrics == pytest.approx(want.metrics, rel=TOLERANCE, abs=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(layout: str, name: str, measure: Measure) -> None:
    assert_same_step(measure(2, **LAYOUTS[layout]).steps[name], measure().steps[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_no_other_layout_does_either(layout: str, name: str, measure: Measure) -> None:
    world = 8 if layout.startswith("dp2") else 2
    assert_same_step(measure(world, **OTHER_LAYOUTS[layout]).steps[name], measure().steps[name])


def test_clips_and_corrections_decide_some_tokens_and_not_others(measure: Measure) -> None:
    """What the tests above compare has both kinds."""
    steps = measure().steps
    for name in ("clip", "clip of tokens", "gspo", "cispo", "gmpo"):
        assert 0.03 < steps[name].metrics["policy/clip_fraction"] < 0.97, name
    assert 0.03 < steps["clipped returns"].metrics["clip_fraction"] < 0.97
    for name in ("icepop", "geometric_mask"):
        assert 0.1 < steps[name].metrics["correction/kept"] < 0.9, name
    assert steps["clip"].metrics["policy/ratio_max"] > 1.5


@pytest.mark.parametrize("layout", ["one rank", *LAYOUTS])
def test_old_logprobs_that_were_evaluated_before_are_those_that_a_step_computes(layout: str, measure: Measure) -> None:
    measured = measure() if layout == "one rank" else measure(2, **LAYOUTS[layout])
    assert_same_step(measured.steps[EVALUATED], measured.steps["on policy"])


def check_evaluations(got: Measured, folders: dict[str, str]) -> None:
    """Each entry is about its token, given those before it; a score is of the whole."""
    assert len(got.logprobs) == len(got.values) == len(got.scores) == COUNT
    for i in range(COUNT):
        assert got.logprobs[i][0] == got.values[i][0] == 0
        logprobs, values = (graph(folders[head], head).outputs[i].detach() for head in ("lm", "value"))
        torch.testing.assert_close(torch.from_numpy(got.logprobs[i][1:]), logprobs, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(torch.from_numpy(got.values[i][1:]), values[:-1], rtol=0, atol=TOLERANCE)
        assert got.scores[i] == pytest.approx(float(values[-1]), abs=TOLERANCE)


@pytest.mark.parametrize("layout", ["one rank", *LAYOUTS])
def test_evaluations_are_those_of_transformers(layout: str, measure: Measure, folders: dict[str, str]) -> None:
    check_evaluations(measure() if layout == "one rank" else measure(2, **LAYOUTS[layout]), folders)


def test_evaluations_over_two_stages_are_too(measure: Measure, folders: dict[str, str]) -> None:
    got = measure(2, names=(), pp=2)
    check_evaluations(got, folders)
    assert got.answers == [False, True]


def test_each_replica_answers_once(measure: Measure) -> None:
    assert measure(2).answers == [True, True]
    assert measure(2, tp=2).answers == measure(2, cp=2).answers == [True, False]
