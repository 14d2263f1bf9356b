"""The Ray actors that host workers: each holds one plain object and calls its methods."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray


class Shell:
    """Hosts a worker whose methods are plain functions, run one at a time on the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._worker: Any = None

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        """Ray's id of the node this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def gpu_ids(self) -> list[int]:
        """Indices of the GPUs that Ray granted."""
        return [int(i) for i in ray.get_gpu_ids()]

    def rendezvous(self) -> tuple[str, int]:
        """This node's address and a port that was free a moment ago."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def build(self, factory: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._worker = factory(*arguments)

    def invoke(self, method: str, argument: Any) -> Any:
        return getattr(self._worker, method)(argument)


class AsyncShell(Shell):
    """Hosts a worker whose methods are coroutines, run concurrently on one event loop."""

    async def build(  # type: ignore[override]
        self, factory: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]
    ) -> None:
        super().build(factory, arguments, environment)

    async def invoke(self, method: str, *arguments: Any) -> Any:  # type: ignore[override]
        return await getattr(self._worker, method)(*arguments)
