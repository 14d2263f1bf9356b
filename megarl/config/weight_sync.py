from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class WeightSyncConfig(Section):
    """How the policy's weights travel from trainer to engines."""

    strategy: Literal["auto", "gather_hf", "micro_dp", "exact"] = "auto"
    """`gather_hf`: gather whole tensors over the training ranks, hand them over under Hugging Face names. `micro_dp`:
    every rank receives what its engine rank needs and it lacks, from its micro-DP group (HybridFlow). `exact`: the same
    from any rank, for any sizes. `auto`: `micro_dp` where the sizes divide and each engine it places lies on one
    machine, else `exact`. Engines with slots of their own receive their part themselves, from any rank: `exact`."""

    bucket_bytes: int = Field(default=256 * 2**20, ge=1)
    """Tensors travel in buckets of at most this size (one larger tensor travels alone)."""

    timeout_seconds: float = Field(default=300.0, gt=0)
    """A sync that takes longer ends the run with an error."""
