"""Loss specifications: which loss a training step computes, with its coefficients and the columns that it reads.

`training/loss.py` computes them. Imports nothing heavy: the controller creates these.

Columns are named values that accompany the trajectories, per sequence or per token (`megarl.batch.pack.ColumnName`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.algorithms.policy import PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoss:
    """Mean negative log-likelihood of the tokens in the loss mask (cross-entropy). Reads no columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Policy-gradient loss: PPO clip, GSPO, CISPO or GMPO, with optional KL penalty and importance weights.

    Columns: `advantages`; `ref_logprobs` if `algorithm.kl_loss` is set; `positive` if `nll` > 0; `old_logprobs` is
    computed by the trainer where it is missing.
    """

    algorithm: PolicyConfig
    length_norm: int
    """Constant that `seq-mean-token-sum-norm` divides each sequence's sum by, in tokens."""
    nll: float = 0.0
    """Coefficient of the negative log-likelihood of sequences whose `positive` is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Clipped mean squared error of a critic.

    Columns: `values` (the critic's, before the step's first update) and `returns`.
    """

    clip: float | None
    """Largest change of a value that the loss rewards; None: no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryLoss:
    """Pairwise ranking loss of a reward or cost model; sequences 2k and 2k + 1 are chosen and rejected.

    Columns: `margins`, and optionally `signs` (see `preference_loss`).
    """

    kind: Literal["reward", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoLoss:
    """Direct preference optimization; sequences are paired as in `BradleyTerryLoss`. Columns: `ref_logprobs`."""

    beta: float
    nll: float = 0.0
    """Coefficient of the chosen sequence's mean negative log-likelihood per token (RPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitPrmLoss:
    """Cross-entropy of an implicit process reward model. Columns: `ref_logprobs` and `outcomes`."""

    beta: float


LossSpec = SftLoss | PolicyLoss | ValueLoss | BradleyTerryLoss | DpoLoss | ImplicitPrmLoss
