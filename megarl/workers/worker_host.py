"""The Ray actors that host workers: plain objects, whose methods they call."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray

from megarl.process.stack_dump import ProcessPlace, give_account
from megarl.process.startup_trace import Diary, ProcessStart
from megarl.workers.stragglers import CallLog, CallRecord


def _own_place() -> ProcessPlace:
    return ProcessPlace(
        node_id=ray.get_runtime_context().get_node_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        account=give_account(),
    )


class Shell:
    """Hosts workers, one a role, whose methods are plain functions, run one at a time on the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._diary, self._place = Diary(), _own_place()
        self._workers: dict[str, Any] = {}
        self._calls = CallLog()

    def rendezvous(self) -> tuple[str, int]:
        """This node's address and a port that was free a moment ago."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def build(
        self,
        role: str,
        factory: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        asked: float,
    ) -> None:
        """Make the worker of `role`, with `environment` added to the process's; `asked`: when, in Unix time."""
        assert role not in self._workers, f"{role} is here already"
        with self._diary.building(asked):
            os.environ.update(environment)
            self._workers[role] = factory(*arguments)

    def came_up(self) -> ProcessStart:
        """How this process did."""
        return self._diary.read()

    def place(self) -> ProcessPlace:
        """Where this process is."""
        return self._place

    def take_calls(self) -> list[CallRecord]:
        """The calls since the last time."""
        return self._calls.take()

    def invoke(self, role: str, method: str, argument: Any) -> Any:
        """`method(argument)` of the worker of `role`."""
        worker = self._workers[role]
        with self._calls.call(role, method, worker):
            return getattr(worker, method)(argument)

    def keep(self, role: str, method: str, argument: Any) -> tuple[None, Any]:
        """As `invoke`; for two references, of which the first only tells that the call is over."""
        return None, self.invoke(role, method, argument)


class AsyncShell:
    """Hosts one worker whose methods are coroutines, run concurrently on one event loop."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._diary, self._place = Diary(), _own_place()
        self._worker: Any = None
        self._building: asyncio.Future[Any] | None = None

    async def expect(self, factory: Callable[..., Any], asked: float) -> None:
        """Have imported what `factory` needs, as it has been by now, before the worker can be built."""
        self._diary.called(asked)

    async def build(
        self, factory: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str], asked: float
    ) -> None:
        """Make the worker, with `environment` added to the process's; `asked`: when, in Unix time.

        `factory` may be a coroutine function.
        """
        with self._diary.building(asked):
            os.environ.update(environment)
            worker = factory(*arguments)
            if inspect.isawaitable(worker):
                self._building = asyncio.ensure_future(worker)
                worker = await self._building
            self._worker = worker

    async def came_up(self) -> ProcessStart:
        """How this process did."""
        return self._diary.read()

    async def place(self) -> ProcessPlace:
        """Where this process is."""
        return self._place

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
