"""Prepares a process for megatron-core: replaces CUDA on machines without it, and patches bugs of megatron-core 0.19.2.

megatron-core takes its device from `torch.cuda.current_device()` or hard-codes `device="cuda"`, overlaps copies on CUDA
streams, keeps dropout state in CUDA generators and sorts gradients by the type name "torch.cuda.FloatTensor". Functions
`_replace_...` replace one of these each on the CPU.

Functions `_patch_...` fix one bug each and name its symptom; most are of the CPU and gloo.
`tests/megatron/runtime/test_mcore_patches.py` calls megatron-core's own functions, `__wrapped__` by the patches, and
fails where one no longer has its bug.

Call `prepare()` once per process, before the first megatron-core import.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megarl.cluster.process.process_start import run_adam_without_compiler

if TYPE_CHECKING:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


class CudaTimer:
    """Total time between the beginning and the end of blocks on the current CUDA stream.

    The events of a block cost a few microseconds; the host waits for the GPU only when the total is read. Kernels of
    other streams do not count, unless the current stream waits for them within a block.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the block to the total; a block that raises is not added."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    def seconds(self) -> float:
        """Return the total so far, once the GPU has finished the blocks."""
        for begin, end in self._pending:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._pending.clear()
        return self._seconds


FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros", "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
"""The functions of torch that take a device."""

_prepared = False


def is_cuda() -> bool:
    """Return whether trainer ranks run on CUDA devices."""
    return torch.cuda.is_available()


def backend() -> str:
    """Return the torch.distributed backend of trainer ranks: nccl or gloo."""
    return "nccl" if is_cuda() else "gloo"


def uses_transformer_engine() -> bool:
    """Return whether layers come from Transformer Engine instead of `megarl.megatron.modeling.torch_layers`."""
    return is_cuda() and find_spec("transformer_engine") is not None


def device() -> torch.device:
    """Return the device of this rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def compute_capability() -> tuple[int, int]:
    """Return the compute capability of this rank's GPU."""
    return torch.cuda.get_device_capability(device())


def device_bytes() -> int:
    """Return the memory of this rank's GPU, in bytes."""
    return torch.cuda.get_device_properties(device()).total_memory


def empty_cache() -> None:
    """Return the device memory that torch has cached to the device, as engines are other processes; nothing on CPU."""
    if is_cuda():
        torch.cuda.empty_cache()


def prepare() -> None:
    """Silence warnings about missing kernel packages, patch megatron-core and, without CUDA, install the emulation."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    _silence_missing_packages()
    if not is_cuda():
        _emulate_cuda_on_cpu()
    _patch_recomputation()
    _patch_routing_padding()
    _patch_packed_rope()
    if not is_cuda():
        _patch_expert_token_counts()
        _patch_uneven_gather()
        _patch_optimizer_on_host()


def _silence_missing_packages() -> None:
    # megatron-core warns once per module that would use them; `megarl doctor` reports them once.
    for pattern in (".*[Aa]pex.*", ".*[Tt]ransformer.?[Ee]ngine.*", ".*TE .*", ".*[Ff]lash.?[Aa]ttention.*"):
        warnings.filterwarnings("ignore", message=pattern)
    warnings.filterwarnings("ignore", message="full scope is deprecated", module="megatron")
    warnings.filterwarnings("ignore", message="MimoModelConfig is experimental", module="megatron")
    # warned for each expert with expert tensor parallelism 1 in a tensor-parallel model
    warnings.filterwarnings("ignore", message=".*but tensor model parallel size is 1. Disab", module="megatron")
    if not is_cuda():
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*", module="megatron")
        warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
    # megatron-core warns of common.pt, which it reads and megarl still writes, and of each GPTModel, which gets bug
    # fixes; torch of a CUDA compiler on a machine without GPUs
    for name in ("dist_checkpointing.strategies.common", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    unwanted = {
        "megatron.core.optimizer": "pex",
        "megatron.core.utils": "pex",
        # it computes the layout of gradient buffers itself
        "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    }
    for name, part in unwanted.items():
        logging.getLogger(name).addFilter(functools.partial(_lacks, part))


def _lacks(part: str, record: logging.LogRecord) -> bool:
    return part not in record.getMessage()


def _emulate_cuda_on_cpu() -> None:
    # megatron-core compiles small functions at their first call, which takes seconds and needs a C compiler
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # a requirement of SGLang that raises OSError without a CUDA driver; megatron-core expects an ImportError
    sys.modules["flash_mla"] = None  # type: ignore[assignment]
    run_adam_without_compiler()
    _replace_device_functions()
    _replace_random_state()
    _replace_tensor_functions()


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Make `torch.compile` return its argument within the block, in which megatron-core is imported.

    megatron-core decorates functions with it, which imports the compiler even if it is disabled; that takes a second.
    """

    def unchanged(function: Callable[..., object]) -> Callable[..., object]:
        return function

    torch_module: Any = torch
    original, torch_module.compile = torch.compile, unchanged
    try:
        yield
    finally:
        torch_module.compile = original


def _replace_device_functions() -> None:
    def ignored(*_: object, **__: object) -> None: ...

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # the device of model, gradient and optimizer buffers
    cuda.synchronize = ignored  # timers
    cuda.current_stream = lambda *_: _NoStream()  # orders the collectives of gradient buffers
    cuda.default_stream = lambda *_: _NoStream()
    cuda.Stream = _NoStream
    cuda.Event = _NoStream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.nvtx.range_push = ignored
    cuda.nvtx.range_pop = ignored


def _replace_random_state() -> None:
    # The tensor-parallel RNG tracker saves, seeds and restores CUDA generator states.
    def get_state(*_: object, **__: object) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.manual_seed = torch.manual_seed
    # imported after the replacements, because it copies torch.cuda's functions at import
    with _without_compiler():
        import megatron.core.tensor_parallel.random as tracker

    tracker._set_cuda_rng_state = set_state


class _NoStream:
    """A CUDA stream or event whose every method does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def _replace_tensor_functions() -> None:
    """Make the functions that make or move tensors use the CPU for CUDA devices, and ignore `pin_memory`.

    A TorchFunctionMode would do the same in one place, and add one to two microseconds to every call of torch and
    every access to an attribute of a tensor, a tenth of the time of a step of a tiny model.
    """
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = Tensor
    to, name_type = tensor.to, tensor.type

    def to_cpu(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        moved: Tensor = to(self, *map(_cpu, args), **_cpu_arguments(kwargs))
        return moved

    def cuda_type(self: Tensor, *args: object, **kwargs: object) -> object:
        # DistributedOptimizer sorts parameters by comparing with "torch.cuda.FloatTensor"
        if args or kwargs:
            return name_type(self, *args, **kwargs)
        return name_type(self).replace("torch.", "torch.cuda.")

    tensor.to, tensor.type = to_cpu, cuda_type
    tensor.cuda = tensor.pin_memory = lambda self, *_, **__: self


def _on_cpu(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **_cpu_arguments(kwargs))

    return call


def _cpu_arguments(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    if "device" in kwargs or "pin_memory" in kwargs:
        return {name: _cpu(value) for name, value in kwargs.items() if name != "pin_memory"}
    return kwargs


def _cpu(value: object) -> object:
    match value:
        case str() if value.startswith("cuda"):
            return "cpu"
        case torch.device(type="cuda"):
            return torch.device("cpu")
    return value


def _patch_recomputation() -> None:
    """Recompute without FP8 where Transformer Engine is missing: NameError with selective recomputation.

    megatron-core takes `fp8=False`, the default that nearly all its callers use, for fp8 enabled.
    """
    from megatron.core.tensor_parallel import random

    if find_spec("transformer_engine") is None:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _patch_routing_padding() -> None:
    """Pad a copy of the routing map: RuntimeError in the backward pass of models with experts in FP8.

    Transformer Engine's fused router keeps the map for its backward pass, and megatron-core pads it in place.
    """
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.pad_routing_map

    @functools.wraps(original)
    def pad(routing_map: Tensor, pad_multiple: int) -> Tensor:
        padded: Tensor = original(routing_map.clone(), pad_multiple)
        return padded

    token_dispatcher.pad_routing_map = pad


def _patch_packed_rope() -> None:
    """Rotate the tokens of a pack in one operation: megatron-core rotates one sequence after the other.

    That is a fifth of a training step with packs of 64 short sequences. It rotates all at once if it gets the angles of
    every token, and takes a table of one sequence's angles for them if the pack happens to be as long as the table.
    """
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_thd

    @functools.wraps(original)
    def rotate(tokens_thd: Tensor, cu_seqlens_S: Tensor, table_L11d: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        starts_T = cu_seqlens_S[:-1].repeat_interleave(cu_seqlens_S.diff())
        angles_T11d = table_L11d[torch.arange(len(starts_T), device=starts_T.device) - starts_T]
        rotated_thd: Tensor = original(tokens_thd, cu_seqlens_S, angles_T11d, *args, **kwargs)
        return rotated_thd

    rope_utils._apply_rotary_pos_emb_thd = rotate


def _patch_expert_token_counts() -> None:
    """Convert expert token counts to numpy on the CPU; megatron-core converts them only from CUDA."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _patch_uneven_gather() -> None:
    """Support uneven all-gathers, which expert tensor parallelism needs and gloo lacks."""
    from megatron.core.tensor_parallel import mappings

    original = mappings._gather_along_first_dim

    @functools.wraps(original)
    def gather(
        x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            gathered: Tensor = original(x, group, sizes, use_global_buffer)
            return gathered
        sizes = [int(n) for n in sizes]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    mappings._gather_along_first_dim = gather


def _patch_optimizer_on_host() -> None:
    """Count all parameters as device tensors where Adam is to step a part of them on the host.

    megatron-core asks `is_cuda`, finds no parameters on a device, and then misses its copies: KeyError in every step.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    @functools.wraps(original)
    def divide(optimizer: HybridDeviceOptimizer, fraction: float) -> object:
        with _PretendDevice():
            return original(optimizer, fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = divide


class _PretendDevice(TorchFunctionMode):
    """Makes `is_cuda` true of every tensor that was not made by `cpu()` or from one that was."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        is_on_host = bool(args) and any(args[0] is tensor for tensor in self._on_host)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_on_host
        result = args[0] if func is Tensor.pin_memory else func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (is_on_host or func is Tensor.cpu):
            self._on_host.append(result)
        return result
