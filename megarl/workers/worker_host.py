"""Ray actors that host workers: plain objects whose methods the actors call."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import ray

from megarl.process.stack_dump import ProcessInfo, register_stack_dump
from megarl.process.startup_trace import StartupTiming, StartupTrace
from megarl.workers.master_port import reserve_master_port
from megarl.workers.stragglers import CallLog, CallRecord


def _read_process_info() -> ProcessInfo:
    return ProcessInfo(
        node_id=ray.get_runtime_context().get_node_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        dump_fd=register_stack_dump(),
    )


class WorkerHost:
    """Hosts one worker per role; worker methods are plain functions and run one at a time on the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._startup_trace, self._process_info = StartupTrace(), _read_process_info()
        self._workers: dict[str, Any] = {}
        self._calls = CallLog()

    def rendezvous(self) -> tuple[str, int]:
        """Reserve a port for torch.distributed's store in this process; return this node's address and the port."""
        return ray.util.get_node_ip_address(), reserve_master_port()

    def build(
        self,
        role: str,
        factory: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        requested_at: float,
    ) -> None:
        """Build the worker of `role`, with `environment` set in the process; `requested_at`: Unix time of the call."""
        assert role not in self._workers, f"this process already has a worker of role {role}"
        with self._startup_trace.record_build(requested_at):
            os.environ.update(environment)
            self._workers[role] = factory(*arguments)

    def startup_timing(self) -> StartupTiming:
        """Return the startup timing of this process."""
        return self._startup_trace.snapshot()

    def process_info(self) -> ProcessInfo:
        """Return node, host and pid of this process."""
        return self._process_info

    def pop_call_records(self) -> list[CallRecord]:
        """Return the records of the calls with equal work since the last call of this."""
        return self._calls.take()

    def invoke(self, role: str, method: str, argument: Any, stage: int | None = None) -> Any:
        """Return `method(argument)` of the worker of `role`.

        Args:
            stage: pipeline stage of the rank, to record the call; None for a call in which ranks do unequal work.
        """
        worker = self._workers[role]
        with nullcontext() if stage is None else self._calls.call(role, method, worker, stage=stage):
            return getattr(worker, method)(argument)

    def invoke_remote(self, role: str, method: str, argument: Any, stage: int | None = None) -> tuple[None, Any]:
        """Return None and the result of `invoke`, for two object references; the first only signals completion."""
        return None, self.invoke(role, method, argument, stage)


class AsyncWorkerHost:
    """Hosts one worker whose methods are coroutines, which run concurrently on one event loop."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._startup_trace, self._process_info = StartupTrace(), _read_process_info()
        self._worker: Any = None
        self._building: asyncio.Future[Any] | None = None

    async def preimport(self, factory: Callable[..., Any], requested_at: float) -> None:
        """No-op whose arguments make Ray import the worker's modules while the process would otherwise wait."""
        self._startup_trace.record_call(requested_at)

    async def build(
        self,
        factory: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        requested_at: float,
    ) -> None:
        """Build the worker, with `environment` set in the process; `requested_at`: Unix time of the call.

        `factory` may be a coroutine function.
        """
        with self._startup_trace.record_build(requested_at):
            os.environ.update(environment)
            worker = factory(*arguments)
            if inspect.isawaitable(worker):
                self._building = asyncio.ensure_future(worker)
                worker = await self._building
            self._worker = worker

    async def startup_timing(self) -> StartupTiming:
        """Return the startup timing of this process."""
        return self._startup_trace.snapshot()

    async def process_info(self) -> ProcessInfo:
        """Return node, host and pid of this process."""
        return self._process_info

    async def invoke(self, method: str, *arguments: Any) -> Any:
        """Return `await method(*arguments)` of the worker; Ray has replaced references by values."""
        return await getattr(self._worker, method)(*arguments)

    async def stop(self) -> None:
        """Shut the worker down, or cancel its construction if it is not built yet."""
        if self._worker is not None:
            await self._worker.shutdown()
        elif self._building is not None:
            self._building.cancel()
            await asyncio.wait([self._building])
