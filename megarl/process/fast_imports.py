"""Faster imports of packages that use torch.compile: megatron-core, SGLang, transformers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import torch, then import modules in the block without what only slows imports.

    There are no garbage collections, which find nothing among new modules, and `torch.compile` waits for the first call
    of the function that it compiles: by itself it imports TorchDynamo and TorchInductor where a function is defined,
    about 1.4 CPU seconds.
    """
    collects = gc.isenabled()
    gc.disable()
    import torch

    compile_now = torch.compile
    torch.compile = functools.partial(compile_on_first_call, compile_now)
    try:
        yield
    finally:
        torch.compile = compile_now
        if collects:
            gc.enable()


def compile_on_first_call(compile_now: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    """Return a function that compiles `model` when it is first called; modules and classes are compiled at once.

    Args:
        compile_now: torch.compile.
        model: as for torch.compile; None: return a decorator.
        options: as for torch.compile.
    """
    if model is None:
        return functools.partial(compile_on_first_call, compile_now, **options)
    if not hasattr(model, "__code__"):
        return compile_now(model, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_now(model, **options)  # type: ignore[no-any-return]

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
