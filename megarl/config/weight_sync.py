"""The section `weight_sync`: transfer of the policy's weights from trainer to engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megarl.config.section import Section


class VerifyConfig(Section):
    """Comparison of all weights of the engines with the trainer's before engines serve them, by sums of their bits."""

    every: int = Field(default=1, ge=1)
    """Compare in the sync of every policy version that this number divides."""


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

    abort_seconds: float = Field(default=10.0, gt=0)
    """A weight sync is aborted on all ranks if one of them fails, if one gives no sign of life for this many seconds,
    or if all wait for each other for this long. A rank that is busy may hold the others up three times as long."""

    delta: bool = False
    """Send only the elements that have changed since the previous sync, as places and values. Every sending rank keeps
    a copy of what it has sent, in host memory. The first sync, and the one after a failed sync or a restarted engine,
    sends all weights. Needs boxes (`micro_dp` or `exact`) and engines that keep their weights while the trainer
    works."""

    verify: VerifyConfig | None = VerifyConfig()
    """Compare what engines hold with what the trainer has sent, in every sync or some of them. An engine that differs
    does not serve the new weights, and the run ends with an error. null, the default with a custom engine: no
    comparison; coverage, dtypes and bytes are checked in every sync."""

    @model_validator(mode="after")
    def _check_delta(self) -> WeightSyncConfig:
        if self.delta and self.strategy == "gather_hf":
            raise ValueError(
                "weight_sync.delta needs weight_sync.strategy to be auto, micro_dp or exact: gather_hf always sends "
                "all weights"
            )
        return self
