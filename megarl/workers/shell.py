"""The Ray actors that host workers: each holds one plain object and calls its methods."""

from __future__ import annotations

import asyncio
import inspect
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

    def rendezvous(self) -> tuple[str, int]:
        """This node's address and a port that was free a moment ago."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def build(self, factory: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]) -> None:
        """Make the worker, with `environment` added to the process's."""
        os.environ.update(environment)
        self._worker = factory(*arguments)

    def invoke(self, method: str, argument: Any) -> Any:
        """`method(argument)` of the worker."""
        return getattr(self._worker, method)(argument)


class AsyncShell(Shell):
    """Hosts a worker whose methods are coroutines, run concurrently on one event loop."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self._building: asyncio.Future[Any] | None = None

    async def build(  # type: ignore[override]
        self, factory: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]
    ) -> None:
        """As the base; `factory` may be a coroutine function."""
        os.environ.update(environment)
        worker = factory(*arguments)
        if inspect.isawaitable(worker):
            self._building = asyncio.ensure_future(worker)
            worker = await self._building
        self._worker = worker

    async def invoke(self, method: str, *arguments: Any) -> Any:
        """`await method(*arguments)` of the worker; Ray has put values in the place of references."""
        return await getattr(self._worker, method)(*arguments)

    async def stop(self) -> None:
        """Cancel the building of the worker, or await the `shutdown` of a built one."""
        if self._worker is not None:
            await self._worker.shutdown()
        elif self._building is not None:
            self._building.cancel()
            await asyncio.wait([self._building])
