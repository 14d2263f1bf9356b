from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.section import Section


class SamplingConfig(Section):
    """How completions are drawn during training; evaluation is greedy."""

    temperature: float = Field(default=1.0, gt=0)
    """Log-probabilities on both sides are of the temperature-scaled distribution."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: all tokens."""


class SglangConfig(Section):
    """The generation engine."""

    type: Literal["sglang"] = "sglang"

    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """GPU memory for weights and KV cache. Default: SGLang's."""

    max_total_tokens: int | None = Field(default=None, ge=1)
    """KV-cache slots. Default: 65,536 on CPU, SGLang's on GPU."""

    max_running_requests: int | None = Field(default=None, ge=1)
    """Sequences decoded together. Default: 128 on CPU, SGLang's on GPU."""

    deterministic: bool | None = None
    """Completions depend on prompt, seed and weights alone, so that a run can be repeated exactly. Costs throughput on
    CUDA. Default: on CPU true, on CUDA false."""

    base_port: int | None = Field(default=None, ge=1024, le=65535)
    """Replica i uses base_port + 100 * i for its process group. Default: free ports."""

    start_timeout_seconds: float = Field(default=600.0, gt=0)

    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Further `sglang.Engine` arguments, by SGLang's own names."""


class RolloutConfig(Section):
    """Generation: engines, sampling and agents."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size of one engine."""

    replicas: int = Field(default=1, ge=1)
    """Number of engines."""

    max_new_tokens: int = Field(default=512, ge=1)
    """Longest completion."""

    sampling: SamplingConfig = SamplingConfig()
    engine: SglangConfig = SglangConfig()

    workers: int = Field(default=1, ge=1)
    """Processes that run agents and rewards."""

    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """A completion that takes longer ends the run with an error."""
