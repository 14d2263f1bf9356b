"""The section `trainer`: parallelism, optimizer, recomputation and offloading of the Megatron workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import lcm
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from megarl.config.megatron import MegatronConfig, MoeConfig
from megarl.config.section import Section, load_object
from megarl.errors import ConfigError
from megarl.text import describe_error
from megarl.user_code import outcome_of, read_number


class ParallelConfig(Section):
    """Megatron's model-parallel sizes. The data-parallel size is the world size / (tp * pp * cp)."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size: number of ranks that split each layer."""

    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel size: number of stages that split the layers."""

    cp: int = Field(default=1, ge=1)
    """Context-parallel size: number of ranks that split each sequence."""

    ep: int = Field(default=1, ge=1)
    """Expert-parallel size: number of ranks that the routed experts are distributed over."""

    etp: int | None = Field(default=None, ge=1)
    """Expert-tensor-parallel size: number of ranks that split each routed expert. Default: tp, as in Megatron."""

    vpp: int = Field(default=1, ge=1)
    """Number of virtual pipeline stages per pipeline rank (interleaved schedule). 1: no interleaving."""

    first_stage_layers: int | None = Field(default=None, ge=1)
    """Number of layers of the first pipeline stage. Default: as many as the middle stages."""

    last_stage_layers: int | None = Field(default=None, ge=1)
    """Number of layers of the last pipeline stage. Default: as many as the middle stages."""

    sequence_parallel: bool | None = None
    """Shard activations over the tensor-parallel group. Default: true if tp > 1."""

    @model_validator(mode="after")
    def _check_sizes(self) -> ParallelConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1, got tp = 1")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp needs pp > 1, got vpp = {self.vpp} with pp = 1")
        return self

    @property
    def expert_tp(self) -> int:
        """Number of ranks that split each routed expert: etp, or tp by default."""
        return self.tp if self.etp is None else self.etp

    @property
    def min_world_size(self) -> int:
        """Smallest world size that these sizes allow: tp * cp * pp, or more where experts need more."""
        return lcm(self.tp * self.cp, self.expert_tp * self.ep) * self.pp

    @property
    def model_size(self) -> int:
        """Number of ranks of one model replica: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations are sharded over the tensor-parallel group."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel


class RecomputeConfig(Section):
    """Activation recomputation: activations that the backward pass recomputes to save memory."""

    granularity: Literal["none", "selective", "full"] = "none"
    """What to recompute. `selective`: only `modules`. `full`: complete layers."""

    modules: tuple[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"], ...] = (
        "core_attn",
    )
    """Parts of a layer that `selective` recomputes. `layernorm` and `moe_act` need Transformer Engine."""

    method: Literal["uniform", "block"] = "uniform"
    """With `full`: `uniform` recomputes all layers, in blocks of `layers`; `block` recomputes only the first `layers`
    layers of each pipeline stage."""

    layers: int = Field(default=1, ge=1)
    """With `full`, number of layers per recomputed block, of which only the input is kept; with `method: block`, number
    of recomputed layers of each pipeline stage."""

    def find_te_problems(self) -> Iterator[str]:
        """Yield a message if `modules` are recomputed that need Transformer Engine."""
        for name in self.modules:
            if self.granularity == "selective" and name in ("layernorm", "moe_act"):
                yield f"trainer.recompute.modules: {name} needs CUDA and Transformer Engine"


DECAYS = ("constant", "linear", "cosine")
"""Shapes of the decay of the learning rate that megatron-core has."""


class OptimizerConfig(Section):
    """Settings of the optimizer and its learning-rate schedule in megatron-core."""

    type: str = "adam"
    """`adam`, which is AdamW by default; `sgd`, which is `torch.optim.SGD`; or the import path of a subclass of
    `torch.optim.Optimizer`, `package.module:Class`, of which an object is created on each rank, as
    `Class(param_groups, lr=lr, weight_decay=weight_decay, **kwargs)`. With `distributed: true` its parameters are the
    ranges of flattened parameters that the rank updates, in float32."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of an optimizer other than Adam, such as `momentum` of `sgd`."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of the schedule."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of linear warm-up."""

    decay: str = "constant"
    """Shape of the decay from `lr` to `min_lr` over the run's optimizer steps: `linear`, `cosine`, `constant` (no
    decay), or the import path of a function, `package.module:function`. It gets the share of the steps after the
    warm-up that are done, from 0 to 1, and returns the share of `lr - min_lr` that is left, from 1 to 0 in a usual
    decay."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Adam's second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Term added to Adam's denominator for stability."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Coefficient of weight decay, which Adam decouples from the gradient. 0: none. Biases and norms have none."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; larger gradients are scaled down to it. 0: no clipping."""

    distributed: bool = True
    """Shard optimizer state over the data-parallel group (megatron-core's DistributedOptimizer)."""

    @property
    def is_adam(self) -> bool:
        """Whether the optimizer is megatron-core's Adam."""
        return self.type == "adam"

    @model_validator(mode="after")
    def _check_type(self) -> OptimizerConfig:
        if self.is_adam:
            if self.kwargs:
                raise ValueError("kwargs are those of another optimizer, got some with type = adam")
            return self
        if self.type != "sgd" and ":" not in self.type:
            raise ValueError(f"type needs to be adam, sgd or package.module:Class, got {self.type!r}")
        for name in ("beta1", "beta2", "eps"):  # a run's own file has the defaults too
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is an option of Adam, got it with type = {self.type}; set it in kwargs")
        for name in ("params", "lr", "weight_decay"):
            if name in self.kwargs:
                raise ValueError(f"kwargs: {name} is an argument that megarl gives; remove it")
        return self

    @field_validator("decay")
    @classmethod
    def _check_decay(cls, decay: str) -> str:
        if decay not in DECAYS and ":" not in decay:
            raise ValueError(f"decay needs to be one of {', '.join(DECAYS)} or package.module:function, got {decay!r}")
        return decay

    @model_validator(mode="after")
    def _check_min_lr(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr needs to be at most lr = {self.lr:g}, got {self.min_lr:g}")
        return self


def load_decay(decay: str, *, key: str) -> Callable[[float], float] | None:
    """Return the function that `OptimizerConfig.decay` names; None for one of `DECAYS`.

    Raises:
        ConfigError: it cannot be imported, or returns something else than a number from 0 to 1 for 0, 0.5 or 1.
    """
    if decay in DECAYS:
        return None
    function = load_object(decay, key=key, kind="function")
    if not callable(function):
        raise ConfigError(f"{key} needs a function, got {decay}, a {type(function).__name__}")
    for done in (0.0, 0.5, 1.0):
        left, error = outcome_of(partial(function, done))
        if error is not None:
            raise ConfigError(f"{key}: {decay}({done:g}) raised {describe_error(error)}") from error
        share = read_number(left)
        if share is None or not 0 <= share <= 1:
            raise ConfigError(f"{key}: {decay}({done:g}) needs to return a number from 0 to 1, got {left!r}")
    return cast("Callable[[float], float]", function)


class OffloadConfig(Section):
    """Trainer memory that is moved to the host while engines generate."""

    optimizer: bool | None = None
    """Offload float32 master weights and the optimizer's state, such as Adam's moments. Default: true on CUDA where
    engines share the devices."""

    gradients: bool | None = None
    """Free the gradient buffers, without a copy. Default: true on CUDA where engines share the devices."""

    weights: bool = False
    """Offload the model's parameters. They are the smallest of the three, and each weight sync needs them back."""

    @property
    def is_enabled(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self.optimizer or self.gradients or self.weights)

    def resolved(self, device: str, *, shared: bool = True) -> OffloadConfig:
        """Return a copy with the defaults for `device`, `cpu` or `cuda`, filled in.

        Args:
            shared: whether engines use the same devices.
        """
        unset = [name for name in ("optimizer", "gradients") if getattr(self, name) is None]
        return self.model_copy(update=dict.fromkeys(unset, device == "cuda" and shared))


class ProfileConfig(Section):
    """Traces of training steps for https://ui.perfetto.dev, by PyTorch's profiler."""

    steps: tuple[int, ...] = Field(min_length=1)
    """Steps whose update of the model is traced, from 1. A trace takes megabytes per step, and the step is slower."""

    ranks: tuple[int, ...] = (0,)
    """Trainer ranks that write a trace, each to `<run_dir>/profile/step-<step>-rank-<rank>.json.gz` on its node."""


class TrainerConfig(Section):
    """Settings of the Megatron workers that train the model."""

    parallel: ParallelConfig = ParallelConfig()
    """Model-parallel sizes of the trainer."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""

    recompute: RecomputeConfig = RecomputeConfig()
    """Activation recomputation in the backward pass."""

    moe: MoeConfig = MoeConfig()
    """Training of the routers of models with experts."""

    megatron: MegatronConfig = MegatronConfig()
    """Fields of megatron-core's own configurations."""

    timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout in seconds of a collective among trainer ranks, in every process group."""

    offload: OffloadConfig = OffloadConfig()
    """Offloading while engines generate. Only `megarl train` has engines."""

    fused_lm_head: bool | None = None
    """Compute log-probabilities and entropies from hidden states, with the logits of some columns of the vocabulary at
    a time, in float32. The backward pass computes them once more unless they fit half of the memory that is free then.
    Default: true on CUDA."""

    profile: ProfileConfig | None = None
    """Traces of training steps. null: none."""

    steps: int = Field(default=100, ge=1)
    """Number of controller steps. In `sft`, `rm` and `dpo`: number of optimizer steps."""

    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Maximum number of tokens of one packed micro-batch, over all context-parallel ranks. A longer sequence gets a
    micro-batch of its own."""

    eval_every: int = Field(default=0, ge=0)
    """Number of steps between evaluations on held-out rows. 0: only before the first step and after the last."""

    @model_validator(mode="after")
    def _check_profile(self) -> TrainerConfig:
        for step in () if self.profile is None else self.profile.steps:
            if not 1 <= step <= self.steps:
                raise ValueError(f"profile.steps needs steps from 1 to trainer.steps = {self.steps}, got {step}")
        return self

    @model_validator(mode="after")
    def _check_megatron(self) -> TrainerConfig:
        model, ddp, parallel = self.megatron.model, self.megatron.ddp, self.parallel
        if ddp.get("overlap_param_gather") and not self.optimizer.distributed:
            raise ValueError("megatron.ddp.overlap_param_gather needs optimizer.distributed: true, got false")
        lr, min_lr = self.megatron.optimizer.get("decoupled_lr"), self.optimizer.min_lr
        if lr is not None and "decoupled_min_lr" not in self.megatron.optimizer and lr < min_lr:
            raise ValueError(
                f"megatron.optimizer.decoupled_lr needs to be at least optimizer.min_lr = {min_lr:g}, got {lr:g}"
            )
        is_special = self.megatron.optimizer.get("use_precision_aware_optimizer") or self.megatron.offloads_adam
        if is_special and not self.optimizer.distributed:
            raise ValueError(
                "megatron.optimizer: Adam on the CPU or in other precisions needs optimizer.distributed: true, got "
                "false"
            )
        if "cp_comm_type" in model and parallel.cp == 1:
            raise ValueError("megatron.model.cp_comm_type needs parallel.cp > 1, got cp = 1")
        if model.get("overlap_p2p_comm_warmup_flush") and parallel.vpp == 1:
            raise ValueError("megatron.model.overlap_p2p_comm_warmup_flush needs parallel.vpp > 1, got vpp = 1")
        if model.get("moe_token_dispatcher_type") == "flex" and parallel.expert_tp * parallel.ep == 1:
            raise ValueError(
                "megatron.model.moe_token_dispatcher_type: flex needs parallel.etp * parallel.ep > 1, got 1 * 1"
            )
        if model.get("cpu_offloading") and (parallel.pp > 1 or self.recompute.granularity != "none"):
            raise ValueError(
                "megatron.model.cpu_offloading needs parallel.pp = 1 and recompute.granularity: none, got pp = "
                f"{parallel.pp} and {self.recompute.granularity}"
            )
        return self


class SupervisedTrainerConfig(TrainerConfig):
    """Settings of the trainer in `sft`, `rm` and `dpo`, which take batches from a file."""

    batch_size: int = Field(default=64, ge=1)
    """Number of demonstrations per optimizer step in `sft`, or of pairs in `rm` and `dpo`."""
