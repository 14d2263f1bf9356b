"""Lets megatron-core run on a machine without CUDA; does nothing where CUDA is available.

megatron-core takes its device from `torch.cuda.current_device()` or writes `device="cuda"`, overlaps copies on CUDA
streams, keeps dropout state in CUDA generators and sorts gradients by the type name "torch.cuda.FloatTensor". Each line
below answers one of these for the CPU. Call `prepare()` once per process, before the first megatron-core import.

Must run on the process's main thread: a TorchFunctionMode is thread-local, and megatron-core is called from there only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_mode: TorchFunctionMode | None = None
_prepared = False


def is_cuda() -> bool:
    """True where trainer ranks run on CUDA devices."""
    return torch.cuda.is_available()


def backend() -> str:
    """The torch.distributed backend of trainer ranks."""
    return "nccl" if is_cuda() else "gloo"


def uses_transformer_engine() -> bool:
    """True where layers come from Transformer Engine rather than from `megarl.megatron.modeling.torch_layers`."""
    return is_cuda() and find_spec("transformer_engine") is not None


def device() -> torch.device:
    """The device of this rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def prepare() -> None:
    """Silence megatron-core's notes on missing accelerator packages and, without CUDA, install the stand-in."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    _silence_missing_packages()
    if not is_cuda():
        _stand_in()
    from megarl.megatron.runtime import mcore_patches

    mcore_patches.without_transformer_engine()
    if not is_cuda():
        mcore_patches.on_cpu()
        mcore_patches.on_gloo()


def _silence_missing_packages() -> None:
    # One line per module that would have used them; `megarl doctor` says it once, in one place.
    for pattern in (".*[Aa]pex.*", ".*[Tt]ransformer.?[Ee]ngine.*", ".*TE .*", ".*[Ff]lash.?[Aa]ttention.*"):
        warnings.filterwarnings("ignore", message=pattern)
    warnings.filterwarnings("ignore", message="full scope is deprecated", module="megatron")
    # each expert that no tensor ranks share, in a model that they do share
    warnings.filterwarnings("ignore", message=".*but tensor model parallel size is 1. Disab", module="megatron")
    if not is_cuda():
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*", module="megatron")
        warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
    for name in ("megatron.core.optimizer", "megatron.core.utils"):
        logging.getLogger(name).addFilter(lambda record: "pex" not in record.getMessage())


def _stand_in() -> None:
    global _mode
    # megatron-core compiles small functions when they are first called: seconds a process, and a C compiler
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _replace_device_functions()
    _replace_random_state()
    _mode = _CpuForCuda()
    _mode.__enter__()  # type: ignore[no-untyped-call]  # for the life of the process


def _replace_device_functions() -> None:
    def ignored(*_: object, **__: object) -> None: ...

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # model, gradient and optimizer buffers are allocated "there"
    cuda.synchronize = ignored  # timers
    cuda.current_stream = lambda *_: _NoStream()  # gradient buffers order their collectives with it
    cuda.default_stream = lambda *_: _NoStream()
    cuda.Stream = _NoStream
    cuda.Event = _NoStream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.nvtx.range_push = ignored
    cuda.nvtx.range_pop = ignored


def _replace_random_state() -> None:
    # The tensor-parallel RNG tracker saves, seeds and restores "CUDA" generator states.
    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.manual_seed = torch.manual_seed
    import megatron.core.tensor_parallel.random as tracker  # imports torch.cuda's functions, so it comes after them

    tracker._set_cuda_rng_state = set_state


class _NoStream:
    """A CUDA stream or event whose every method does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


class _CpuForCuda(TorchFunctionMode):
    """Turns `device="cuda"` into cpu in every torch call, drops pinned memory, and names types as CUDA does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # DistributedOptimizer sorts parameters by comparing with "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to:
            args = tuple(_cpu(a) for a in args)
        if kwargs:
            kwargs = {k: _cpu(v) if k == "device" else v for k, v in kwargs.items() if k != "pin_memory"}
            return func(*args, **kwargs)
        return func(*args)


def _cpu(value: Any) -> Any:
    match value:
        case str() if value.startswith("cuda"):
            return "cpu"
        case torch.device(type="cuda"):
            return torch.device("cpu")
    return value
