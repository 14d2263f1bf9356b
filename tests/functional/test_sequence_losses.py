"""Losses of answers and pairs against loops and finite differences: of preferences, and PRIME's outcome loss."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.functional.losses import PreferenceLossOutput, Sequences, dpo_loss, preference_loss, rpo_loss
from megarl.functional.process_rewards import implicit_reward_loss
from tests.errors import expect_error
from tests.functional.packs import gradient, iter_sequences, make_pack, numerical_gradient, outcome_loss

B = 12


def random_tensor(seed: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=B) * 3)


CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = (random_tensor(seed) for seed in range(4))
TOKENS = torch.tensor(np.random.default_rng(4).integers(1, 50, B))
MARGINS = random_tensor(5).abs()
CHOSEN_SIGNS, REJECTED_SIGNS = (torch.tensor(np.random.default_rng(seed).choice([-1.0, 1.0], B)) for seed in (6, 7))
SIGNS = {"chosen_signs_B": CHOSEN_SIGNS, "rejected_signs_B": REJECTED_SIGNS}


def minus_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


def test_dpo_and_rpo_match_a_loop() -> None:
    dpo = dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.3)
    rpo = rpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, TOKENS, beta=0.3, alpha=0.7)
    for i in range(B):
        c, r, rc, rr = (float(x[i]) for x in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED))
        want = minus_log_sigmoid(0.3 * ((c - rc) - (r - rr)))
        assert float(dpo.loss_B[i]) == pytest.approx(want)
        assert float(rpo.loss_B[i]) == pytest.approx(want + 0.7 * -c / int(TOKENS[i]))
        assert float(rpo.chosen_rewards_B[i]) == pytest.approx(0.3 * (c - rc))
        assert float(rpo.rejected_rewards_B[i]) == pytest.approx(0.3 * (r - rr))


@pytest.mark.parametrize("margins", [None, MARGINS])
def test_preference_loss_matches_a_loop(margins: Tensor | None) -> None:
    reward = preference_loss(CHOSEN, REJECTED, margins_B=margins)
    cost = preference_loss(CHOSEN, REJECTED, margins_B=margins, kind="cost")
    signed = preference_loss(CHOSEN, REJECTED, margins_B=margins, kind="cost", **SIGNS)
    for i in range(B):
        c, r = float(CHOSEN[i]), float(REJECTED[i])
        margin = 0.0 if margins is None else float(margins[i])
        assert float(reward.loss_B[i]) == pytest.approx(minus_log_sigmoid(c - r - margin))
        assert float(cost.loss_B[i]) == pytest.approx(minus_log_sigmoid(r - c - margin))
        of_signs = minus_log_sigmoid(float(CHOSEN_SIGNS[i]) * c) + minus_log_sigmoid(float(REJECTED_SIGNS[i]) * r)
        assert float(signed.loss_B[i]) == pytest.approx(minus_log_sigmoid(r - c - margin) + of_signs)
    assert torch.equal(reward.chosen_rewards_B, CHOSEN)
    assert torch.equal(signed.rejected_rewards_B, -REJECTED)


def all_losses(chosen_B: Tensor, rejected_B: Tensor) -> list[PreferenceLossOutput]:
    return [
        dpo_loss(chosen_B, rejected_B, REF_CHOSEN, REF_REJECTED, beta=0.3),
        rpo_loss(chosen_B, rejected_B, REF_CHOSEN, REF_REJECTED, TOKENS, beta=0.3, alpha=0.7),
        preference_loss(chosen_B, rejected_B, margins_B=MARGINS),
        preference_loss(chosen_B, rejected_B, kind="cost"),
        preference_loss(chosen_B, rejected_B, kind="cost", **SIGNS),
    ]


@pytest.mark.parametrize("which", range(5))
def test_gradients_match_finite_differences(which: int) -> None:
    for function, at in (
        (lambda x: all_losses(x, REJECTED)[which].loss_B.sum(), CHOSEN),
        (lambda x: all_losses(CHOSEN, x)[which].loss_B.sum(), REJECTED),
    ):
        assert torch.allclose(gradient(function, at), numerical_gradient(function, at), atol=1e-8)


def test_rewards_are_detached_and_huge_differences_finite() -> None:
    leaf = CHOSEN.clone().requires_grad_()
    for loss in all_losses(leaf, REJECTED):
        assert loss.loss_B.requires_grad
        assert not loss.chosen_rewards_B.requires_grad
    for loss in all_losses(CHOSEN - 1e6, REJECTED + 1e6):
        assert loss.loss_B.isfinite().all()


def test_invalid_safety_signs_are_rejected() -> None:
    with expect_error(ValueError, "answers"):
        preference_loss(CHOSEN, REJECTED, kind="cost", chosen_signs_B=CHOSEN_SIGNS)
    with expect_error(ValueError, "'cost'", "needs"):
        preference_loss(CHOSEN, REJECTED, **SIGNS)


def test_outcome_loss_matches_a_loop() -> None:
    pack = make_pack()
    want = []
    rows = iter_sequences(pack, pack.logprobs_T, pack.old_logprobs_T)
    for (mask, new, ref), right in zip(rows, pack.outcomes_S.tolist(), strict=True):
        p = 1 / (1 + math.exp(-0.7 * (new - ref)[mask].sum()))
        want.append(-(right * math.log(p) + (1 - right) * math.log(1 - p)) if mask.any() else 0.0)
    assert outcome_loss(pack).tolist() == pytest.approx(want, rel=1e-10)
    assert want.count(0.0) == 2


def test_outcome_loss_gradient_and_parts() -> None:
    pack = make_pack(1)

    def total(logprobs_T: Tensor) -> Tensor:
        return outcome_loss(pack.with_logprobs(logprobs_T)).sum()

    want = numerical_gradient(total, pack.logprobs_T)
    assert want.abs().max() > 0.01
    assert torch.allclose(gradient(total, pack.logprobs_T), want, atol=1e-8)
    assert torch.allclose(torch.cat([outcome_loss(part) for part in pack.split()]), outcome_loss(pack), rtol=1e-12)


def test_outcome_loss_of_an_extreme_logit_is_finite() -> None:
    sequences = Sequences.of(torch.tensor([0, 2]))
    args = (torch.tensor([0.0, -1e5]), torch.zeros(2), torch.tensor([1.0]), torch.ones(2, dtype=torch.bool))
    assert implicit_reward_loss(*args, sequences, beta=0.05).tolist() == pytest.approx([5000.0])
