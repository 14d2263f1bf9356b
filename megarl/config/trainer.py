from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megarl.config.section import Section


class ParallelConfig(Section):
    """Megatron's model-parallel sizes; data parallelism is what remains of the world."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size."""

    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size."""

    cp: int = Field(default=1, ge=1)
    """Context parallel size."""

    ep: int = Field(default=1, ge=1)
    """Expert parallel size."""

    vpp: int = Field(default=1, ge=1)
    """Virtual pipeline stages per pipeline rank."""

    sequence_parallel: bool | None = None
    """Shard activations over the tensor-parallel group. Default: on when tp > 1."""

    @model_validator(mode="after")
    def _supported(self) -> ParallelConfig:
        for name in ("cp", "ep", "vpp"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} needs to be 1 in this version, got {getattr(self, name)}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1, got tp = 1")
        return self

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations are sharded over the tensor-parallel group."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel


class OptimizerConfig(Section):
    """Adam and its schedule, as megatron-core runs them."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape from the peak to `min_lr`, over the run's optimizer steps."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Gradients are scaled to this global norm when they exceed it; 0 turns clipping off."""

    distributed: bool = True
    """Shard optimizer state over the data-parallel group (megatron-core's DistributedOptimizer)."""


class TrainerConfig(Section):
    """How the Megatron workers train."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    steps: int = Field(default=100, ge=1)
    """Controller steps (for SFT: optimizer steps)."""

    batch_size: int = Field(default=64, ge=1)
    """SFT only: demonstrations per optimizer step."""

    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Token budget of one packed micro-batch; a longer sequence gets one of its own."""

    eval_every: int = Field(default=0, ge=0)
    """Evaluate on the held-out rows every so many steps; 0: only before the first and after the last."""
