"""All losses: compared with transformers and the papers' formulas, and every parallel layout with one rank.

Reference formulas are computed per trajectory. Legend: n tokens of a trajectory, K of them sampled.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms import find_algorithm
from megarl.batch.pack import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.algorithm import CispoConfig, GmpoConfig, GrpoConfig, GspoConfig
from megarl.config.policy import DecoupledConfig, KlLossConfig, RolloutIsConfig
from megarl.data.preference_pairs import PreferencePair
from megarl.functional.losses import Denominators
from megarl.losses import (
    AnyLoss,
    BradleyTerryLoss,
    DpoLoss,
    ImplicitPrmLoss,
    PolicyLoss,
    SftLoss,
    ValueHeadLoss,
    ValueLoss,
)
from megarl.megatron.requests import ForwardRequest, MiniBatch, TrainRequest
from megarl.megatron.trainer_worker import TrainerWorker
from megarl.stages import make_pair_request
from tests.megatron import rank_models
from tests.megatron.conftest import save_model
from tests.megatron.fidelity.measure import as_trajectory, assert_same_gradients
from tests.megatron.fidelity.reference import _load, _logprobs
from tests.megatron.rank_models import gather, gather_full, model_spec, own_part, trainer_spec
from tests.megatron.ranks import run_ranks, sample

TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5
"""Relative to the largest gradient of the tensor. Larger than TOLERANCE, because gradients of a pair partly cancel."""
LENGTHS = (2, 34, 90, 5, 21, 13, 55, 3, 8, 47, 17, 30)
UNSAMPLED_INDEX = 5
"""Index of the trajectory without sampled tokens."""
MAX_TOKENS = 110
LENGTH_NORM = 40
COUNT = len(LENGTHS)

LAYOUTS = {"dp2": {}, "cp2": {"cp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 tp2 cp2": {"tp": 2, "cp": 2}}
LAYOUTS_OF_FEW_CASES = ("dp2", "tp2")
"""By default all losses run on context-parallel ranks, which share sequences, and few on these."""


def make_trajectories() -> list[Trajectory]:
    rng, out = np.random.default_rng(0), []
    for i, n in enumerate(LENGTHS):
        mask = np.zeros(n, bool)
        if i != UNSAMPLED_INDEX:
            mask[int(rng.integers(1, n // 3 + 2)) :] = True
        if n > 12:
            mask[n // 2 + 2 : n // 2 + 4] = False  # tool output within the sequence
        if n == 21:
            mask[-2:] = False  # tool output at the end
        out.append(as_trajectory(rng.integers(2, 331, n), mask, number=i, logprob=-5.0))
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
    loss: AnyLoss
    columns: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        return "value" if isinstance(self.loss, ValueHeadLoss) else "lm"


def policy_case(algorithm: Any, *columns: str, nll: float = 0.0, old: bool = True) -> Case:
    """Policy loss with per-token advantages if `columns` names them, else one advantage per trajectory."""
    token_loss = find_algorithm(algorithm.type)().token_loss(algorithm)
    return Case(
        loss=PolicyLoss(token_loss=token_loss, algorithm=algorithm, length_norm=LENGTH_NORM, nll=nll),
        columns=(*columns, *(["old_logprobs"] if old else [])),
        scalars=(*([] if "advantages" in columns else ["advantages"]), *(["positive"] if nll else [])),
    )


def grpo(**fields: Any) -> GrpoConfig:
    return GrpoConfig(**{"kl_loss": None, **fields})


CORRECTIONS = {
    "token_tis": RolloutIsConfig(kind="token_tis", high=1.1),
    "sequence_tis": RolloutIsConfig(kind="sequence_tis", high=1.5),
    "icepop": RolloutIsConfig(kind="icepop", low=0.9, high=1.1),
    "geometric_mask": RolloutIsConfig(kind="geometric_mask", low=0.97, high=1.03),
}
GSPO = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05}
ALL_OPTIONS: dict[str, Any] = {"kl_loss": KlLossConfig(coefficient=0.3), "entropy_coefficient": 0.1}
ALL_OPTIONS["rollout_is"] = CORRECTIONS["sequence_tis"]
CASES = {
    "sft": Case(loss=SftLoss()),
    "ppo_clip": policy_case(grpo(clip_ratio_high=0.28, dual_clip=1.5)),
    "ppo_clip of token advantages": policy_case(grpo(), "advantages"),
    "on policy": policy_case(grpo(clip_ratio_high=0.28, dual_clip=1.5), old=False),
    **{
        f"kl {kind}": policy_case(grpo(kl_loss=KlLossConfig(kind=kind, coefficient=0.3)), "ref_logprobs")
        for kind in ("k2", "k3")
    },
    **{name: policy_case(grpo(rollout_is=correction)) for name, correction in CORRECTIONS.items()},
    "decoupled": policy_case(grpo(decoupled=DecoupledConfig())),
    "decoupled, capped": policy_case(grpo(decoupled=DecoupledConfig(behave_cap=1.05), dual_clip=1.5)),
    **{
        mode: policy_case(grpo(aggregation=mode))
        for mode in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    "gspo": policy_case(GspoConfig(**GSPO)),
    "cispo": policy_case(CispoConfig(clip_ratio_high=0.2), "advantages"),
    "gmpo": policy_case(GmpoConfig(clip_log_ratio_low=0.3, clip_log_ratio_high=0.2)),
    "nll": policy_case(grpo(), nll=0.4),
    "entropy bonus": policy_case(grpo(entropy_coefficient=0.2)),
    "all options": policy_case(GspoConfig(**GSPO, **ALL_OPTIONS), "ref_logprobs", nll=0.4),
    "value": Case(loss=ValueLoss(clip=None), columns=("values", "returns")),
    "clipped value": Case(loss=ValueLoss(clip=0.5), columns=("values", "returns")),
    "bradley-terry reward": Case(loss=BradleyTerryLoss(kind="reward")),
    "bradley-terry cost": Case(loss=BradleyTerryLoss(kind="cost")),
    "bradley-terry cost with signs": Case(loss=BradleyTerryLoss(kind="cost"), scalars=("signs",)),
    "dpo": Case(loss=DpoLoss(beta=0.3), columns=("ref_logprobs",)),
    "rpo": Case(loss=DpoLoss(beta=0.3, nll=0.7), columns=("ref_logprobs",)),
    "implicit prm": Case(loss=ImplicitPrmLoss(beta=0.2), columns=("ref_logprobs",), scalars=("outcomes",)),
}

FEW_CASES = (
    *("sft", "on policy", "ppo_clip", "all options", "seq-mean-token-sum-norm", "nll"),
    *("clipped value", "bradley-terry cost with signs", "rpo", "implicit prm"),
)
PRECOMPUTED = "ppo_clip, precomputed old log-probabilities"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Metrics and gradients of one step; the weights are not updated."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Measured:
    steps: dict[str, Step]
    logprobs: dict[int, np.ndarray]
    values: dict[int, np.ndarray]
    scores: dict[int, float]
    has_results: list[bool]
    """By rank: whether it returned forward results."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Trajectories with engine log-probabilities, and the columns that losses read."""

    trajectories: list[Trajectory]
    columns: Mapping[str, list[np.ndarray]] = field(default_factory=dict)


def make_pairs(trajectories: list[Trajectory], *, labeled: bool) -> list[PreferencePair]:
    return [
        PreferencePair(
            chosen=trajectories[i],
            rejected=trajectories[i + 1],
            margin=SCALARS["margins"][i],
            safe=(SCALARS["signs"][i] < 0, SCALARS["signs"][i + 1] < 0) if labeled else None,
        )
        for i in range(0, COUNT, 2)
    ]


def sample_refs(names: Iterable[str] = ()) -> tuple[SampleRef, ...]:
    """Return all samples, with the scalars of these names."""
    scalars = [{name: SCALARS[name][i] for name in names} for i in range(COUNT)]
    return tuple(SampleRef(payload=0, index=i, num_tokens=n, scalars=scalars[i]) for i, n in enumerate(LENGTHS))


def make_request(case: Case, data: Data) -> TrainRequest:
    if isinstance(case.loss, BradleyTerryLoss | DpoLoss):
        pairs, refs = make_pairs(data.trajectories, labeled="signs" in case.scalars), data.columns["ref_logprobs"]
        refs = refs if case.columns else None
        return make_pair_request(pairs, case.loss, max_tokens=MAX_TOKENS, ref_logprobs=refs)
    parts = {
        name: [{(0, i): data.columns[name][i] for i in of} for of in (range(0, COUNT, 2), range(1, COUNT, 2))]
        for name in case.columns
    }
    count = Denominators(num_tokens=NUM_TOKENS, num_sequences=COUNT, num_positive_tokens=NUM_POSITIVE_TOKENS)
    return TrainRequest(
        mini_batches=(MiniBatch(samples=sample_refs(case.scalars), denominators=count),),
        payloads=(LocalPayload(data.trajectories),),
        max_tokens_per_micro_batch=MAX_TOKENS,
        loss=case.loss,
        columns={name: LocalPayload(column) for name, column in parts.items()},
    )


def measure_on_rank(folders: Mapping[str, str], parallel: Mapping[str, int], data: Data, names: list[str]) -> Measured:
    workers = {
        head: TrainerWorker(trainer_spec(model_spec(folder, parallel, head=head), distributed=False))
        for head, folder in folders.items()
    }
    payloads = (LocalPayload(data.trajectories),)
    request = ForwardRequest(samples=sample_refs(), payloads=payloads, max_tokens_per_micro_batch=MAX_TOKENS)
    own = own_part(workers["lm"].model, request)
    gathered = gather((workers["lm"].logprobs(own), workers["value"].values(own), workers["value"].scores(own)))
    logprobs, values, scores = ({k[1]: v for each in gathered for k, v in each[i].items()} for i in range(3))

    def step(name: str, given: Data) -> Step:
        worker = workers[CASES[name].head]
        metrics, gradients = step_on_rank(worker, own_part(worker.model, make_request(CASES[name], given)))
        metrics = rank_models.gather_metrics(worker.model, metrics)
        return Step(metrics=metrics, gradients=gather_full(worker.model, gradients))

    steps = {name: step(name, data) for name in names}
    if names:
        columns = {**data.columns, "old_logprobs": [logprobs[i] for i in range(COUNT)]}
        steps[PRECOMPUTED] = step("ppo_clip", replace(data, columns=columns))
    has_results = [any(each) for each in gathered]
    return Measured(steps=steps, logprobs=logprobs, values=values, scores=scores, has_results=has_results)


def step_on_rank(worker: Any, request: TrainRequest) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and this rank's shard of the gradients; the weights are not updated."""
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> bool:
        gradients.update(rank_models.collect_gradients(worker.trainer))
        return False

    worker.trainer.optimizer.prepare_grads = keep_gradients
    worker.trainer.optimizer.step_with_ready_grads = lambda: True
    (batch,) = request.mini_batches
    assert len(batch.micro_batches) > 1
    stats = worker.train_step(request)
    return {k: v for k, v in stats.metrics.items() if not k.startswith(("grad_norm", "learning_rate"))}, gradients


@pytest.fixture(scope="module")
def folders(qwen3_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"lm": qwen3_path, "value": save_model(tmp_path_factory.mktemp("value"), "qwen2", values=True)}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Differentiable outputs of a transformers model on the trajectories, and its parameters."""

    outputs: list[Tensor]
    """Language model: log-probabilities [n - 1] of tokens 1 to n - 1. Value model: values [n]."""
    entropies: list[Tensor]
    """Language model: entropies [n - 1] of the distributions of tokens 1 to n - 1."""
    parameters: dict[str, Tensor]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True, materialize_grads=True)
        return dict(zip(self.parameters, gradients, strict=True))


@cache
def graph(folder: str, head: str) -> Graph:
    from transformers import AutoModelForSequenceClassification

    entropies = []
    if head == "lm":
        model = _load(folder)
        outputs = [_logprobs(model, tokens) for tokens in TOKENS]
        for tokens in TOKENS:
            logprobs = model(torch.tensor(tokens)[None, :-1], use_cache=False).logits[0].log_softmax(-1)
            entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    else:
        model = _load(folder, AutoModelForSequenceClassification)
        hidden = (model.model(torch.tensor(tokens)[None], use_cache=False).last_hidden_state for tokens in TOKENS)
        outputs = [model.score(each)[0, :, 0] for each in hidden]
    return Graph(outputs=outputs, entropies=entropies, parameters=dict(model.named_parameters()))


@pytest.fixture(scope="module")
def data(folders: dict[str, str]) -> Data:
    """Old and reference log-probabilities near the policy's, and engine log-probabilities near the old ones."""
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
    """Function that measures a layout; results are cached."""

    @cache
    def run(layout: str = "one rank", names: tuple[str, ...] = tuple(CASES)) -> Measured:
        world = {"one rank": 1, "dp2 tp2 cp2": 8}.get(layout, 2)
        folder = tmp_path_factory.mktemp("ranks")
        return run_ranks(measure_on_rank, world, folder, folders, LAYOUTS.get(layout, {}), data, list(names))

    return run


def select_sampled(values: list[np.ndarray], i: int) -> Tensor:
    """Return the values of trajectory i's sampled tokens, [K]."""
    return torch.from_numpy(values[i][1:])[SAMPLED[i]]


def policy_loss_of_sequence(algorithm: Any, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss of each sampled token, [K]."""
    ratio = (logprobs - old).exp()
    match algorithm.type:
        case "grpo":
            bounded = ratio.clip(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
            gain = torch.minimum(advantages * ratio, advantages * bounded)
            if algorithm.dual_clip:
                gain = torch.where(advantages < 0, torch.maximum(gain, algorithm.dual_clip * advantages), gain)
            return -gain
        case "gspo":  # arXiv 2507.18071, equation 5
            sequence_ratio = (logprobs - old).mean().exp()
            bounded = sequence_ratio.clip(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
            return -torch.minimum(advantages * sequence_ratio, advantages * bounded)
        case "cispo":
            return -ratio.detach().clip(max=1 + algorithm.clip_ratio_high) * advantages * logprobs
        case "gmpo":
            sign, log_ratio = advantages[0].sign(), logprobs - old  # arXiv 2507.20673, equation 4
            bounded = log_ratio.clip(-algorithm.clip_log_ratio_low, algorithm.clip_log_ratio_high)
            kept = torch.minimum(sign * log_ratio, sign * bounded)
            return -advantages * (sign * kept).mean().exp()


def importance_weights_of_sequence(correction: RolloutIsConfig, old: Tensor, rollout: Tensor) -> Tensor:
    """Return the importance weight of each sampled token, [K]."""
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


def reference_policy_loss(case: Case, data: Data, of: Graph) -> tuple[Tensor, dict[str, float]]:
    loss: Any = case.loss
    algorithm, total = loss.algorithm, torch.zeros(())
    token_sums: dict[str, float] = {}
    largest, likelihood = 0.0, torch.zeros(())
    for i in range(COUNT):
        if i == UNSAMPLED_INDEX:
            continue
        logprobs, entropies = of.outputs[i][SAMPLED[i]], of.entropies[i][SAMPLED[i]]
        old = select_sampled(data.columns["old_logprobs"], i) if "old_logprobs" in case.columns else logprobs.detach()
        if "advantages" in case.columns:
            advantages = select_sampled(data.columns["advantages"], i)
        else:
            advantages = torch.full_like(old, SCALARS["advantages"][i])
        losses = policy_loss_of_sequence(algorithm, logprobs, old, advantages)
        ratio = (logprobs - old).detach().exp()
        if algorithm.type in ("gspo", "gmpo"):
            ratio = (ratio.prod() ** (1 / len(ratio))).expand(len(ratio))
        token_metrics = {"policy/ratio": ratio, "policy/kl_old": (old - logprobs).detach()}
        rollout = select_sampled([t.logprobs for t in data.trajectories], i)
        if algorithm.type == "grpo" and algorithm.decoupled is not None:
            weights = (old - rollout).exp().clip(max=algorithm.decoupled.behave_cap or float("inf"))
            losses = losses * weights
            token_metrics["correction/weight"] = weights
        if algorithm.rollout_is is not None:
            weights = importance_weights_of_sequence(algorithm.rollout_is, old, rollout)
            losses = losses * weights
            token_metrics |= {"correction/weight": weights, "correction/kept": (weights > 0).float()}
        if algorithm.kl_loss is not None:
            d = logprobs - select_sampled(data.columns["ref_logprobs"], i)
            kl = {"k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[algorithm.kl_loss.kind]
            losses = losses + algorithm.kl_loss.coefficient * kl
            token_metrics["policy/kl_reference"] = kl.detach()
        losses = losses - algorithm.entropy_coefficient * entropies
        token_metrics["entropy"] = entropies.detach()
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
        for name, values in token_metrics.items():
            token_sums[name] = token_sums.get(name, 0.0) + float(values.sum())
    metrics = {name: value / NUM_TOKENS for name, value in token_sums.items()} | {"policy/ratio_max": largest}
    if loss.nll:
        metrics["policy/positive_nll"] = float(likelihood.detach())
    return total + loss.nll * likelihood, metrics


def reference_value_loss(clip: float | None, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    losses, values = [], []
    for i in range(COUNT):
        before = outputs[i][:-1][SAMPLED[i]]  # the value of a token is the model's output at the token before it
        old, returns = (select_sampled(data.columns[name], i) for name in ("values", "returns"))
        squares = (before - returns) ** 2
        if clip is not None:
            squares = torch.maximum(squares, (old + (before - old).clip(-clip, clip) - returns) ** 2)
        losses.append(squares / 2)
        values.append(before.detach())
    return torch.cat(losses).sum() / NUM_TOKENS, {"values": float(torch.cat(values).sum() / NUM_TOKENS)}


def reference_implicit_prm_loss(beta: float, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    losses, right = [], []
    for i in range(COUNT):
        if i == UNSAMPLED_INDEX:
            continue
        outcome = SCALARS["outcomes"][i]
        logit = beta * (outputs[i][SAMPLED[i]] - select_sampled(data.columns["ref_logprobs"], i)).sum()
        probability = logit.sigmoid()
        losses.append(-(outcome * probability.log() + (1 - outcome) * (1 - probability).log()))
        right.append((float(probability.detach()) > 0.5) == bool(outcome))
    # without sampled tokens the implicit reward is 0, which predicts failure
    right.append(not SCALARS["outcomes"][UNSAMPLED_INDEX])
    return torch.stack(losses).sum() / COUNT, {"accuracy": sum(right) / COUNT}


def reference_preference_loss(case: Case, data: Data, outputs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    loss: Any = case.loss
    losses, metrics = [], []
    for pair in ((i, i + 1) for i in range(0, COUNT, 2)):
        if isinstance(loss, BradleyTerryLoss):
            chosen, rejected = (outputs[i][-1] for i in pair)
            gap = chosen - rejected if loss.kind == "reward" else rejected - chosen
            value = -logsigmoid(gap - SCALARS["margins"][pair[0]])
            if "signs" in case.scalars:
                value = value - sum(logsigmoid(SCALARS["signs"][i] * outputs[i][-1]) for i in pair)
            values = {"score": (chosen + rejected) / 2}
        else:
            sums = [outputs[i][SAMPLED[i]].sum() for i in pair]
            refs = (select_sampled(data.columns["ref_logprobs"], i).sum() for i in pair)
            chosen, rejected = (loss.beta * (logprob - ref) for logprob, ref in zip(sums, refs, strict=True))
            gap = chosen - rejected
            value = -logsigmoid(gap) - loss.nll * sums[0] / int(SAMPLED[pair[0]].sum())
            values = {"chosen_reward": chosen, "rejected_reward": rejected}
        losses.append(value)
        metrics.append(values | {"accuracy": (gap > 0).float(), "gap": gap})
    means = {name: sum(float(each[name].detach()) for each in metrics) / len(metrics) for name in metrics[0]}
    return torch.stack(losses).mean(), means


def reference(case: Case, data: Data, of: Graph) -> tuple[Tensor, dict[str, float]]:
    match case.loss:
        case PolicyLoss():
            return reference_policy_loss(case, data, of)
        case ValueLoss(clip=clip):
            return reference_value_loss(clip, data, of.outputs)
        case ImplicitPrmLoss(beta=beta):
            return reference_implicit_prm_loss(beta, data, of.outputs)
        case SftLoss():
            logprobs = torch.cat([of.outputs[i][SAMPLED[i]] for i in range(COUNT)])
            return -logprobs.sum() / NUM_TOKENS, {}
    return reference_preference_loss(case, data, of.outputs)


@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradients_match_transformers(name: str, measure: Measure, data: Data, folders: Any) -> None:
    case, got = CASES[name], measure().steps[name]
    of = graph(folders[case.head], case.head)
    loss, metrics = reference(case, data, of)
    for metric, value in ({"loss": float(loss.detach())} | metrics).items():
        assert got.metrics[metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric
    want = of.gradients(loss)
    assert max(float(gradient.abs().max()) for gradient in want.values()) > 1e-3
    assert_same_gradients(got.gradients, want, GRADIENT_TOLERANCE)


def assert_same_step(got: Step, want: Step) -> None:
    assert got.metrics == pytest.approx(want.metrics, rel=TOLERANCE, abs=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients, GRADIENT_TOLERANCE)


ALL_CELLS = [(layout, name) for layout in LAYOUTS for name in CASES]
FEW_CELLS = [(layout, name) for layout in LAYOUTS_OF_FEW_CASES for name in FEW_CASES]


@pytest.mark.parametrize(("layout", "name"), FEW_CELLS)
def test_few_losses_match_one_rank(layout: str, name: str, measure: Measure) -> None:
    assert_same_step(measure(layout, FEW_CASES).steps[name], measure().steps[name])


@pytest.mark.parametrize(("layout", "name"), sample(ALL_CELLS, [cell for cell in ALL_CELLS if cell[0] == "cp2"]))
def test_layouts_match_one_rank(layout: str, name: str, measure: Measure) -> None:
    assert_same_step(measure(layout).steps[name], measure().steps[name])


def test_clipping_and_corrections_affect_only_some_tokens(measure: Measure) -> None:
    """The cases above contain both clipped and unclipped, corrected and uncorrected tokens."""
    steps = measure().steps
    for name in ("ppo_clip", "ppo_clip of token advantages", "gspo", "cispo", "gmpo"):
        assert 0.03 < steps[name].metrics["policy/clip_fraction"] < 0.97, name
    assert 0.03 < steps["clipped value"].metrics["clip_fraction"] < 0.97
    for name in ("icepop", "geometric_mask"):
        assert 0.1 < steps[name].metrics["correction/kept"] < 0.9, name
    assert steps["ppo_clip"].metrics["policy/ratio_max"] > 1.5


@pytest.mark.parametrize("layout", ["one rank", "cp2", *LAYOUTS_OF_FEW_CASES])
def test_precomputed_old_logprobs_match_those_computed_in_the_step(layout: str, measure: Measure) -> None:
    steps = (measure(layout, FEW_CASES) if layout in LAYOUTS_OF_FEW_CASES else measure(layout)).steps
    assert_same_step(steps[PRECOMPUTED], steps["on policy"])


def check_forward_results(got: Measured, folders: dict[str, str]) -> None:
    """Check per-token results, each of token i given the tokens before it, and scores, of the full sequence."""
    assert len(got.logprobs) == len(got.values) == len(got.scores) == COUNT
    for i in range(COUNT):
        assert got.logprobs[i][0] == got.values[i][0] == 0
        logprobs, values = (graph(folders[head], head).outputs[i].detach() for head in ("lm", "value"))
        sampled = SAMPLED[i]  # only these reach the language head
        got_logprobs, got_values = (torch.from_numpy(of[i][1:]) for of in (got.logprobs, got.values))
        torch.testing.assert_close(got_logprobs[sampled], logprobs[sampled], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(got_values, values[:-1], rtol=0, atol=TOLERANCE)
        assert got.scores[i] == pytest.approx(float(values[-1]), abs=TOLERANCE)


HAS_RESULTS = {
    "one rank": [True],
    "dp2": [True, True],
    "cp2": [True, False],
    "tp2": [True, False],
    "pp2": [False, True],
}
"""By layout and rank: each replica returns forward results on one rank."""


@pytest.mark.parametrize("layout", HAS_RESULTS)
def test_forward_results_match_transformers(layout: str, measure: Measure, folders: dict[str, str]) -> None:
    names = (FEW_CASES,) if layout in LAYOUTS_OF_FEW_CASES else ((),) if layout == "pp2" else ()
    got = measure(layout, *names)
    check_forward_results(got, folders)
    assert got.has_results == HAS_RESULTS[layout]
