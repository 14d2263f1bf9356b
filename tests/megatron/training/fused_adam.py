"""A stand-in for Transformer Engine's FusedAdam with 16-bit parameters, in plain torch: its state and its arguments.

As there, the optimizer steps the 16-bit parameter, keeps the float32 one in its state as `master_param`, counts steps
by group, and reads the gradient from `decoupled_grad`. A float32 parameter is stepped itself; its `master_param` keeps
the first value.
"""

import sys
from contextlib import ExitStack
from types import ModuleType
from unittest.mock import patch

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with moments and main parameters in the dtypes of Transformer Engine's arguments."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        adam_w_mode=True,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        master_weights=False,
        master_weight_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        capturable=False,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert (adam_w_mode, master_weights, use_decoupled_grad) == (True, True, True)
        assert (store_param_remainders, capturable) == (False, False)
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}

    def initialize_state(self, param, store_param_remainders):
        """Create the state of a parameter."""
        assert not store_param_remainders
        for name, dtype in self.dtypes.items():
            self.state[param][name] = torch.zeros(param.shape, dtype=dtype)
        self.state[param]["master_param"].copy_(param.detach())

    @torch.no_grad()
    def step(self):
        """Step all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                self._step(param, self.state[param], group)

    def _step(self, param, state, group):
        grad, (beta1, beta2) = param.decoupled_grad.float(), group["betas"]
        first = state["exp_avg"].float().lerp(grad, 1 - beta1)
        second = state["exp_avg_sq"].float() * beta2 + (1 - beta2) * grad * grad
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        main = state["master_param"] if param.dtype == torch.bfloat16 else param
        main.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        main.sub_(group["lr"] / (1 - beta1 ** group["step"]) * first / denominator)
        param.copy_(main)


def _with_one_dtype(apply):
    """Return megatron-core's `multi_tensor_applier`, which checks what kernels take for granted."""

    def checked(kernel, overflow, lists, *arguments):
        assert all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in lists), "tensors of several dtypes"
        return apply(kernel, overflow, lists, *arguments)

    return checked


def install(patches: ExitStack) -> None:
    """Make megatron-core use the stand-in."""
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer_config

    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    modules["transformer_engine.pytorch.optimizers"] = ModuleType("transformer_engine.pytorch.optimizers")
    modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam
    patches.enter_context(patch.dict(sys.modules, modules))
    patches.enter_context(patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False))
    checked = _with_one_dtype(clip_grads.multi_tensor_applier)
    patches.enter_context(patch.object(clip_grads, "multi_tensor_applier", checked))
    patches.enter_context(patch.object(optimizer, "is_te_min_version", lambda _: True))
    patches.enter_context(patch.object(optimizer_config, "is_te_min_version", lambda _: True))
    patches.enter_context(patch.object(distrib_optimizer, "Adam", FusedAdam))
