from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class WeightSyncConfig(Section):
    """How the policy's weights travel from trainer to engines."""

    strategy: Literal["gather_hf"] = "gather_hf"
    """`gather_hf`: gather whole tensors over the training ranks, hand them over under Hugging Face names."""

    bucket_bytes: int = Field(default=256 * 2**20, ge=1)
    """Tensors travel in buckets of at most this size (one larger tensor travels alone)."""

    timeout_seconds: float = Field(default=300.0, gt=0)
    """A sync that takes longer ends the run with an error."""
