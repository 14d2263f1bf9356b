"""The section `weight_sync`: transfer of the policy's weights from trainer to engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class WeightSyncConfig(Section):
    """Transfer of the policy's weights from trainer to engines after each step."""

    strategy: Literal["auto", "gather_hf", "micro_dp", "exact"] = "auto"
    """`gather_hf`: gather full tensors over the trainer ranks and pass them on by their Hugging Face names. `micro_dp`:
    each rank receives only the shards that its engine rank needs and it does not hold, from its micro-DP group
    (HybridFlow). `exact`: the same, from any rank and for any parallel sizes. `auto`: `micro_dp` if the sizes divide
    and each engine is on one node, else `exact`. Engines with their own pool always use `exact`: they receive their
    shards from any rank over the network."""

    bucket_bytes: int = Field(default=256 * 2**20, ge=1)
    """Maximum size in bytes of a transfer bucket. A larger tensor gets a bucket of its own."""

    timeout_seconds: float = Field(default=300.0, gt=0)
    """Timeout in seconds of one weight sync; a longer one ends the run with an error."""
