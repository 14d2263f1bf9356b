"""Optimizers other than Adam: `torch.optim.SGD`, and classes outside the package, tried out on a few values.

megarl needs of a class what Adam has: it reads `lr` and `weight_decay` from its parameter groups, where the schedule
sets them, and keeps nothing between steps but tensors of the parameter's shape and a count `step`, which are what
checkpoints hold. Under the distributed optimizer each parameter is a range of a flattened one, so that a value's update
may not depend on other values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megarl.config.megatron import MegatronConfig
from megarl.config.section import load_class
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.errors import ConfigError
from megarl.text import describe_error
from megarl.user_code import outcome_of

Groups = list[dict[str, Any]]

STEP = "step"
"""Name of the count of steps, in the state of each parameter or in its group."""

RESERVED_STATES = (STEP, "param")
"""Names that tensors of the state may not have; checkpoints call main parameters `param`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerClass:
    """A class of optimizers that has passed the trial."""

    create: Callable[[Groups], Optimizer]
    """Creates an optimizer of parameter groups; raises ConfigError if the constructor does."""
    state_bytes: int
    """Bytes of state per value of a float32 parameter."""


def load_optimizer(
    config: OptimizerConfig, megatron: MegatronConfig, parallel: ParallelConfig, *, key: str
) -> OptimizerClass:
    """Import the class that `OptimizerConfig.type` names and try it out on a few values on the CPU.

    Args:
        config: of an optimizer other than Adam.
        key: YAML key of the section.

    Raises:
        ConfigError: it cannot be imported, is no `torch.optim.Optimizer`, does not take its arguments, raises an
            exception, is random, does not follow the schedule, or keeps state that checkpoints do not hold; its updates
            depend on how tensors are divided; or options are set that only Adam has.
    """
    if megatron.adam_fields:
        names = ", ".join(megatron.adam_fields)
        raise ConfigError(f"trainer.megatron.optimizer: {names} need {key}.type: adam, got {config.type}")
    found = torch.optim.SGD if config.type == "sgd" else load_class(config.type, key=f"{key}.type")
    if not issubclass(found, Optimizer):
        raise ConfigError(f"{key}.type needs a subclass of torch.optim.Optimizer, got {config.type}")
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay, **config.kwargs}
    try:
        inspect.signature(found).bind([], **arguments)
    except TypeError as e:
        raise ConfigError(
            f"{key}.kwargs: {config.type} needs to take (param_groups, *, lr, weight_decay) and these arguments: {e}"
        ) from e

    def create(groups: Groups) -> Optimizer:
        optimizer, error = outcome_of(partial(found, groups, **arguments))
        if error is not None:
            raise ConfigError(f"{key}: creating {config.type} raised {describe_error(error)}") from error
        assert isinstance(optimizer, Optimizer)
        return optimizer

    trial = _Trial(create, name=f"{key}.type: {config.type}")
    shapes = [(24,)] if config.distributed else [(4, 5), (4,)]
    values, optimizer = trial.run(shapes, lr=0.5)
    if not torch.equal(values, trial.run(shapes, lr=0.5)[0]):
        raise ConfigError(
            f"{trial.name} takes different steps with the same gradients, and replicas have to stay equal"
        )
    moved, _ = trial.run(shapes, lr=1e-9)
    start = torch.cat([p.flatten() for p in trial.parameters(shapes)])
    if (moved - start).abs().max() > 1e-3 * (values - start).abs().max():
        raise ConfigError(
            f"{trial.name} does not read lr from its parameter groups, where the schedule of the learning rate sets it"
        )
    if config.distributed or parallel.tp > 1 or parallel.expert_tp > 1:
        whole, _ = trial.run([(4, 6)], lr=0.5)
        divided, _ = trial.run([(10,), (14,)], lr=0.5)
        if not torch.allclose(whole, divided, rtol=1e-5, atol=1e-6):
            raise ConfigError(
                f"{trial.name} updates a value by others of its tensor or by the shape of it, and ranks hold parts of "
                f"tensors; it needs {key}.distributed: false and parallel.tp = parallel.etp = 1"
            )
    tensors = [each for state in optimizer.state.values() for name, each in state.items() if name != STEP]
    num_bytes = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
    return OptimizerClass(create=create, state_bytes=num_bytes // sum(map(prod, shapes)))


@dataclass(frozen=True, slots=True)
class _Trial:
    """Steps of an optimizer on 24 fixed values."""

    create: Callable[[Groups], Optimizer]
    name: str
    """YAML key and class, for messages."""

    def parameters(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return float32 parameters of these shapes, which together have 24 values, with gradients."""
        generator = torch.Generator().manual_seed(0)
        values, gradients = torch.randn(2, 24, generator=generator)
        sizes = [prod(shape) for shape in shapes]
        parameters: list[Tensor] = []
        for shape, value, gradient in zip(shapes, values.split(sizes), gradients.split(sizes), strict=True):
            parameter = torch.nn.Parameter(value.clone().view(shape))
            parameter.grad = gradient.clone().view(shape)
            parameters.append(parameter)
        return parameters

    def run(self, shapes: Sequence[tuple[int, ...]], *, lr: float) -> tuple[Tensor, Optimizer]:
        """Take three steps at a learning rate; return the values and the optimizer.

        Raises:
            ConfigError: it raises an exception, or keeps state that checkpoints do not hold.
        """
        parameters = self.parameters(shapes)
        optimizer = self.create([{"params": parameters, "wd_mult": 1.0}])
        for group in optimizer.param_groups:
            group |= {"lr": lr, "weight_decay": 0.01}
        first: dict[str, object] = {}
        for number in range(3):
            with torch.no_grad():  # as megatron-core calls it
                _, error = outcome_of(optimizer.step)
            if error is not None:
                raise ConfigError(f"{self.name}: step raised {describe_error(error)}") from error
            if number == 0:
                first = _numbers(optimizer)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(-0.5)
        changed = sorted(name for name, value in _numbers(optimizer).items() if first.get(name, value) != value)
        if changed:
            raise ConfigError(f"{self.name} keeps {changed[0]} between steps, and checkpoints do not hold it")
        self._check_state(optimizer, parameters)
        return torch.cat([parameter.detach().flatten() for parameter in parameters]), optimizer

    def _check_state(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        held = "checkpoints hold tensors of the parameter's shape and a whole number called step"
        known = set(map(id, parameters))
        steps = [group[STEP] for group in optimizer.param_groups if STEP in group]
        for key, state in optimizer.state.items():
            if id(key) not in known:
                raise ConfigError(f"{self.name} has state of {key!r}, which is no parameter; {held}")
            for name, value in state.items():
                if name == STEP:
                    steps.append(value)
                elif not is_saved_state(name, value, key):
                    raise ConfigError(f"{self.name} has the state {name!r}, {_describe(value)}; {held}")
        counts = {outcome_of(partial(float, step))[0] for step in steps}
        if len(counts) > 1 or any(count is None or count != int(count) for count in counts):
            raise ConfigError(f"{self.name} has the state 'step', {', '.join(map(_describe, steps))}; {held}")


def is_saved_state(name: object, value: object, parameter: Tensor) -> bool:
    """Return whether a value of the state of a parameter is one that checkpoints hold; the count of steps is apart."""
    return (
        isinstance(name, str)
        and name not in RESERVED_STATES
        and isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.is_contiguous()
    )


def _numbers(optimizer: Optimizer) -> dict[str, object]:
    """Return the numbers that the optimizer has in its groups and attributes, by what messages call them."""
    items = chain(
        ((f"the attribute {name!r}", value) for name, value in vars(optimizer).items()),
        ((f"the option {name!r} of a group", each) for g in optimizer.param_groups for name, each in _options(g)),
    )
    return {name: float(value) for name, value in items if _is_number(value)}


def _options(group: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(name, value) for name, value in group.items() if name != STEP]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
