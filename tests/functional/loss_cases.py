"""Every loss over packed tokens as a function of one pack, for tests that apply to all losses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megarl.functional import (
    cispo_loss,
    clipped_policy_loss,
    decoupled_policy_loss,
    gmpo_loss,
    gspo_loss,
    implicit_reward_loss,
    kl_penalty,
    value_loss,
)
from megarl.functional.losses import PolicyLossOutput
from tests.functional.packs import Pack


def inputs(pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
    return pack.logprobs_T, pack.old_logprobs_T, pack.advantages_T


def decoupled(pack: Pack) -> PolicyLossOutput:
    new_T, old_T, advantages_T = inputs(pack)
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "behave_cap": 1.3, "dual_clip": 1.5}
    return decoupled_policy_loss(new_T, old_T, pack.behave_logprobs_T, advantages_T, **bounds)


POLICY_LOSSES: dict[str, Callable[[Pack], PolicyLossOutput]] = {
    "clipped": lambda pack: clipped_policy_loss(*inputs(pack), clip_low=0.2, clip_high=0.28),
    "dual-clipped": lambda pack: clipped_policy_loss(*inputs(pack), clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    "gspo": lambda pack: gspo_loss(*inputs(pack), pack.mask_T, pack.sequences, clip_low=0.1, clip_high=0.15),
    "cispo": lambda pack: cispo_loss(*inputs(pack), clip_high=0.5),
    "gmpo": lambda pack: gmpo_loss(*inputs(pack), pack.mask_T, pack.sequences, clip_low=0.4, clip_high=0.3),
    "decoupled": decoupled,
}

LOSSES: dict[str, Callable[[Pack], Tensor]] = {
    **{name: lambda pack, loss=loss: loss(pack).loss_T for name, loss in POLICY_LOSSES.items()},
    **{
        kind: lambda pack, kind=kind: kl_penalty(pack.logprobs_T, pack.old_logprobs_T, kind=kind)
        for kind in ("k1", "k2", "k3")
    },
    # the input to differentiate is always `logprobs_T`; the value loss takes it as values
    "value": lambda pack: value_loss(pack.logprobs_T, pack.old_logprobs_T, pack.values_T, clip=0.5).loss_T,
    "value, unclipped": lambda pack: value_loss(pack.logprobs_T, pack.old_logprobs_T, pack.values_T, clip=None).loss_T,
}


def outcome_loss(pack: Pack) -> Tensor:
    """[S] outcome loss of each sequence."""
    return implicit_reward_loss(
        pack.logprobs_T, pack.old_logprobs_T, pack.outcomes_S, pack.mask_T, pack.sequences, beta=0.7
    )
