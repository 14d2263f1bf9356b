"""The sections `trainer.megatron`, fields of megatron-core's configurations, and `trainer.moe`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from megarl.config.megatron_fields import ALLOWED, CLASS_OF, NEEDS_TE, REFUSED, Part, classify
from megarl.config.section import Section

Fields: TypeAlias = dict[str, Any]
"""Fields of one of megatron-core's configurations, by name, as they are in YAML."""


class MegatronConfig(Section):
    """Fields of megatron-core's configurations, by its own names, for all models of the run that Megatron computes.

    They win over what megarl would set. `megarl check` prints what megarl sets and refuses fields that it needs itself.
    """

    model: Fields = Field(default={})
    """Fields of `TransformerConfig`, such as `fp8`, `cp_comm_type`, `attention_backend` or `moe_token_dispatcher_type`.
    Those whose names begin with `moe_` have no effect on models without experts. `transformer_impl: local` takes
    torch's layers instead of Transformer Engine's."""

    ddp: Fields = Field(default={})
    """Fields of `DistributedDataParallelConfig`, such as `overlap_grad_reduce`. Default: gradients are accumulated and
    reduced in float32; on CUDA with more than one data- or context-parallel rank, they are reduced during the backward
    pass (`overlap_grad_reduce`) and parameters are gathered during the next forward pass (`overlap_param_gather`)."""

    optimizer: Fields = Field(default={})
    """Fields of `OptimizerConfig`, such as `optimizer_cpu_offload`, for all trained models."""

    @field_validator("model", "ddp", "optimizer")
    @classmethod
    def _check_fields(cls, fields: Fields, info: ValidationInfo) -> Fields:
        assert info.field_name is not None
        problems = list(find_field_problems(cast("Part", info.field_name), fields))
        if problems:
            raise ValueError("; ".join(problems))
        return fields

    @model_validator(mode="after")
    def _check_combinations(self) -> MegatronConfig:
        if self.ddp.get("overlap_param_gather") and not self.ddp.get("overlap_grad_reduce"):
            raise ValueError("ddp.overlap_param_gather needs ddp.overlap_grad_reduce: true, as in Megatron")
        fp8, recipe = self.model.get("fp8"), self.model.get("fp8_recipe")
        if (fp8 is None) != (recipe is None):
            raise ValueError(
                f"model.fp8 and model.fp8_recipe need each other, got {fp8} and {recipe}; Megatron's default recipe, "
                "delayed scaling, has state that is not in checkpoints"
            )
        if self.model.get("moe_router_dtype") == "fp64" and self.model.get("moe_router_fusion"):
            raise ValueError("model.moe_router_fusion needs moe_router_dtype: fp32, got fp64")
        self._check_optimizer_dtypes()
        self._check_learning_rates()
        return self

    def _check_optimizer_dtypes(self) -> None:
        offloads, is_aware = self.offloads_adam, self.optimizer.get("use_precision_aware_optimizer")
        if offloads and is_aware is False:
            raise ValueError(
                "optimizer.optimizer_cpu_offload needs use_precision_aware_optimizer, which is then on by default, got "
                "false"
            )
        if offloads and self.optimizer.get("decoupled_weight_decay") is False:
            raise ValueError("optimizer.optimizer_cpu_offload needs decoupled_weight_decay, got false")
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"):
            if self.optimizer.get(name) == "bfloat16" and (offloads or not is_aware):
                raise ValueError(
                    f"optimizer.{name}: bfloat16 needs use_precision_aware_optimizer without optimizer_cpu_offload"
                )
        if self.optimizer.get("main_grads_dtype") == "bfloat16" and self.ddp.get("grad_reduce_in_fp32") is not False:
            raise ValueError("optimizer.main_grads_dtype: bfloat16 needs ddp.grad_reduce_in_fp32: false")

    def _check_learning_rates(self) -> None:
        lr, min_lr = self.optimizer.get("decoupled_lr"), self.optimizer.get("decoupled_min_lr")
        if min_lr is not None and lr is None:
            raise ValueError(f"optimizer.decoupled_min_lr needs decoupled_lr, got {min_lr:g} alone")
        if lr is not None and not 0 <= (min_lr or 0.0) <= lr:
            raise ValueError(
                f"optimizer.decoupled_min_lr needs to be from 0 to decoupled_lr = {lr:g}, got {min_lr or 0.0:g}"
            )

    @property
    def allows_te_layers(self) -> bool:
        """Whether layers may be Transformer Engine's; False: they are torch's."""
        return self.model.get("transformer_impl") != "local"

    @property
    def offloads_adam(self) -> bool:
        """Whether Adam's moments and float32 parameters are on the host, and updated there."""
        return bool(self.optimizer.get("optimizer_cpu_offload"))

    def find_te_problems(self) -> Iterator[str]:
        """Yield one message for each field that needs Transformer Engine."""
        for name, values in NEEDS_TE.items():
            if self.model.get(name) in values:
                yield f"trainer.megatron.model.{name}: {self.model[name]} needs CUDA and Transformer Engine"
        if self.model.get("cp_comm_type") is not None:
            yield "trainer.megatron.model.cp_comm_type: needs CUDA and Transformer Engine"
        if self.optimizer.get("use_precision_aware_optimizer") and not self.offloads_adam:
            yield (
                "trainer.megatron.optimizer.use_precision_aware_optimizer: needs CUDA and Transformer Engine, or "
                "optimizer_cpu_offload"
            )


class MoeConfig(Section):
    """Training of the routers of models with experts."""

    freeze_router: bool = False
    """Keep the weights of the routers as they are. Tokens are still routed to other experts as hidden states change."""

    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss (arXiv 2101.03961, equation 4) that is added to the loss of every trained
    model, summed over layers. 0: none. It is a mean over the tokens of an update; padding does not count."""

    aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """Tokens among which the load-balancing loss balances experts: those of a micro-batch; of a sequence (arXiv
    2412.19437, equations 17 to 20), which does not depend on how sequences are packed; or of all micro-batches and
    data-parallel ranks so far in an update. Each micro-batch or sequence weighs by its tokens."""

    @model_validator(mode="after")
    def _check_frozen(self) -> MoeConfig:
        if self.freeze_router and self.aux_loss_coeff:
            raise ValueError(f"aux_loss_coeff trains the routers, which are frozen, got {self.aux_loss_coeff}")
        return self


def find_field_problems(part: Part, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield one message, beginning with its name, for each field that `trainer.megatron` cannot set."""
    for name, value in fields.items():
        entries = classify(part, name)
        if not entries:
            known = [*ALLOWED[part], *(each for refused in REFUSED[part] for each in refused.names)]
            close = difflib.get_close_matches(name, [each for each in known if "*" not in each], n=1)
            hint = f"; did you mean {close[0]}?" if close else _find_other_part(part, name)
            yield f"{name}: megatron-core's {CLASS_OF[part]} has no such field{hint}"
        elif entries[0]:
            yield f"{name}: {entries[0]}"
        elif not _has_type(value, ALLOWED[part][name]):
            yield f"{name}: needs {ALLOWED[part][name].replace(' |', ',')}, got {value!r}"


def _find_other_part(part: Part, name: str) -> str:
    for other, class_name in CLASS_OF.items():
        if other != part and classify(other, name):
            return f"; {class_name} has one, set in trainer.megatron.{other}"
    return ""


def _has_type(value: object, kind: str) -> bool:
    return any(_matches(value, each) for each in kind.split(" | "))


def _matches(value: object, kind: str) -> bool:
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        case "list":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "null":
            return value is None
        case _:
            return value == kind
