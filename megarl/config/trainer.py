from __future__ import annotations

from math import lcm
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
    """Expert parallel size: ranks among which routed experts are dealt."""

    etp: int | None = Field(default=None, ge=1)
    """Expert tensor parallel size: ranks that split each routed expert. Default: tp, as in Megatron."""

    vpp: int = Field(default=1, ge=1)
    """Virtual pipeline stages per pipeline rank (the interleaved schedule)."""

    first_stage_layers: int | None = Field(default=None, ge=1)
    """Layers of the first pipeline stage. Default: as many as the stages between."""

    last_stage_layers: int | None = Field(default=None, ge=1)
    """Layers of the last pipeline stage. Default: as many as the stages between."""

    sequence_parallel: bool | None = None
    """Shard activations over the tensor-parallel group. Default: on when tp > 1."""

    @model_validator(mode="after")
    def _possible(self) -> ParallelConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1, got tp = 1")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp needs pp > 1, got vpp = {self.vpp} with pp = 1")
        return self

    @property
    def expert_tp(self) -> int:
        """Ranks that split each routed expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def smallest_world(self) -> int:
        """The fewest ranks on which these sizes are possible: tp * cp * pp, or more where experts need more."""
        return lcm(self.tp * self.cp, self.expert_tp * self.ep) * self.pp

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations are sharded over the tensor-parallel group."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel


class RecomputeConfig(Section):
    """Activations that the backward pass computes anew instead of keeping them."""

    granularity: Literal["none", "selective", "full"] = "none"
    """`selective`: only `modules`. `full`: whole layers."""

    modules: tuple[Literal["core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"], ...] = ("core_attn",)
    """Parts of a layer that `selective` computes anew."""

    layers: int = Field(default=1, ge=1)
    """`full` keeps the input of every so many layers."""


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


class OffloadConfig(Section):
    """What leaves the trainer's devices for host memory while engines generate."""

    optimizer: bool | None = None
    """float32 masters and Adam's moments. Default: on CUDA, where engines share the devices."""

    gradients: bool | None = None
    """The buffers that gradients are summed up in: freed, not copied. Default: on CUDA."""

    weights: bool = False
    """Parameters as the model computes with them: the least of the three, and what every push starts from."""

    @property
    def anything(self) -> bool:
        """Whether there is something to do."""
        return bool(self.optimizer or self.gradients or self.weights)

    def resolved(self, device: str, *, shared: bool = True) -> OffloadConfig:
        """With every default replaced by what it stands for on `device`, `cpu` or `cuda`.

        Args:
            shared: engines use the same devices.
        """
        unset = [name for name in ("optimizer", "gradients") if getattr(self, name) is None]
        return self.model_copy(update=dict.fromkeys(unset, device == "cuda" and shared))


class TrainerConfig(Section):
    """How the Megatron workers train."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    recompute: RecomputeConfig = RecomputeConfig()

    offload: OffloadConfig = OffloadConfig()
    """Between the phases of reinforcement learning; SFT has one phase."""

    steps: int = Field(default=100, ge=1)
    """Controller steps (for SFT: optimizer steps)."""

    batch_size: int = Field(default=64, ge=1)
    """SFT only: demonstrations per optimizer step."""

    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Token budget of one packed micro-batch; a longer sequence gets one of its own. Context-parallel ranks
    share it."""

    eval_every: int = Field(default=0, ge=0)
    """Evaluate on the held-out rows every so many steps; 0: only before the first and after the last."""
