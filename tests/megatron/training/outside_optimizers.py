"""Optimizers as users write them, in one file."""

import torch


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (arXiv 2302.06675, algorithm 2)."""

    def __init__(self, params, lr, weight_decay=0.0, *, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["momentum"].lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                state["momentum"].lerp_(p.grad, 1 - beta2)


class Mean(torch.optim.Optimizer):
    """Descent along the mean of all gradients: replaces its state in every step, and counts steps as integers."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                total = state.get("total", torch.zeros_like(p)) + p.grad
                self.state[p] = {"step": state.get("step", 0) + 1, "total": total}
                p.sub_(group["lr"] * total / self.state[p]["step"])


class CountsInGroups(Mean):
    """Counts steps in its groups, and keeps its state in bfloat16."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                total = self.state[p].setdefault("total", torch.zeros_like(p, dtype=torch.bfloat16))
                total.add_(p.grad)
                p.sub_(group["lr"] * total.float() / group["step"])


class WholeNorm(Mean):
    """Divides a gradient by its norm, which takes all of the tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class ConstantRate(Mean):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr, weight_decay)
        self.lr = lr

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.lr * p.grad)


class Random(Mean):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * torch.rand_like(p))


class CountsInItself(Mean):
    count = 0

    def step(self, closure=None):
        self.count += 1
        super().step()


class ChangesGroups(Mean):
    def step(self, closure=None):
        for group in self.param_groups:
            group["scale"] = 2 * group.get("scale", 1)
        super().step()


class KeepsNumbers(Mean):
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["largest"] = float(state["total"].max())


class Raises(Mean):
    def step(self, closure=None):
        raise SystemExit("no")


class CannotBeCreated(Mean):
    def __init__(self, params, lr, weight_decay):
        raise ValueError("never")


def function(params, lr, weight_decay):
    return None


class NoOptimizer:
    pass
