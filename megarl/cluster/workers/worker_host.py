"""Ray actors that host workers: plain objects whose methods the actors call."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from megarl.cluster.process.ports import reserve_master_port
from megarl.cluster.process.process_start import StartupTiming, StartupTrace, freeze_objects
from megarl.cluster.process.stack_dump import ProcessInfo, register_stack_dump
from megarl.cluster.workers.dispatch import CallBatches
from megarl.cluster.workers.stragglers import CallTime, timed_call
from megarl.errors import MegarlError


def read_process_info() -> ProcessInfo:
    """Return where this process runs: its node in Ray, host and pid."""
    return ProcessInfo(
        node_id=ray.get_runtime_context().get_node_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        dump_fd=register_stack_dump(),
    )


class CollectedCalls(NamedTuple):
    """Results of calls that were sent to a process together and have finished."""

    results: tuple[tuple[int, Any | MegarlError], ...]
    """The index of each call, and its small result or error."""
    num_ready: int
    """Number of calls that have finished as well, which the next call returns."""


def pack_call(role: str, method: str, *, is_timed: bool) -> str:
    """Return which method of which role's worker to call, and whether its time is returned as well.

    They are one argument of a call, because each costs as much as all the rest of a call that returns little.
    """
    return json.dumps((role, method, is_timed))


class WorkerHost:
    """Hosts one worker per role; worker methods are plain functions and run one at a time on the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._startup_trace, self._process_info = StartupTrace(), read_process_info()
        self._workers: dict[str, Any] = {}

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
            freeze_objects(collect=True)

    def run(self, function: Callable[[], Any]) -> Any:
        """Return the result of `function`, called in this process."""
        return function()

    def startup_timing(self) -> StartupTiming:
        """Return the startup timing of this process."""
        return self._startup_trace.snapshot()

    def process_info(self) -> ProcessInfo:
        """Return node, host and pid of this process."""
        return self._process_info

    def invoke(self, call: str, argument: Any = None) -> Any:
        """Return the result of a call that `pack_call` describes; if it is timed, a tuple of it and its `CallTime`."""
        worker, method, is_timed = self._unpack_call(call)
        return timed_call(worker, method, argument) if is_timed else getattr(worker, method)(argument)

    def _unpack_call(self, call: str) -> tuple[Any, str, bool]:
        role, method, is_timed = json.loads(call)
        return self._workers[role], method, is_timed

    def prepare(self, function: Callable[[Any], Any], argument: Any) -> tuple[None, Any]:
        """Return None and `function(argument)`, for two object references; the first only signals completion."""
        return None, function(argument)

    def invoke_remote(self, call: str, argument: Any = None) -> tuple[CallTime | None, Any]:
        """Return the result as the second of two object references; the first, for completion, has its `CallTime`."""
        worker, method, is_timed = self._unpack_call(call)
        if not is_timed:
            return None, getattr(worker, method)(argument)
        result, seconds = timed_call(worker, method, argument)
        return seconds, result


class AsyncWorkerHost:
    """Hosts one worker whose methods are coroutines, which run concurrently on one event loop."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._startup_trace, self._process_info = StartupTrace(), read_process_info()
        self.worker: Any = None
        """None until `build` has made it."""
        self.batches = CallBatches(self.invoke_with_value)
        """Calls begun by `begin_calls` whose results have not been collected."""
        self._building: asyncio.Future[Any] | None = None

    async def preimport(self, factory: Callable[..., Any], requested_at: float) -> None:
        """No-op whose arguments make Ray import the worker's modules while the process would otherwise wait."""
        self._startup_trace.record_call(requested_at)

    async def run(self, function: Callable[[], None]) -> None:
        """Run `function`, which the next calls wait for."""
        function()

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
            self.worker = worker
            freeze_objects()

    async def startup_timing(self) -> StartupTiming:
        """Return the startup timing of this process."""
        return self._startup_trace.snapshot()

    async def process_info(self) -> ProcessInfo:
        """Return node, host and pid of this process."""
        return self._process_info

    async def invoke(self, method: str, *arguments: Any) -> Any:
        """Return `await method(*arguments)` of the worker; Ray has replaced references by values."""
        return await getattr(self.worker, method)(*arguments)

    async def begin_calls(
        self, batch_id: str, method: str, arguments: Sequence[Any], per_object: int, num_objects: int
    ) -> tuple[Any, ...]:
        """Begin `method(argument)` for each argument; the method returns a small result and a large value.

        The values of an object are a tuple, or the sequence that the worker's function `join_values` makes of them.

        Returns:
            As `collect_calls`.

        Args:
            batch_id: name of these calls, unique in this process.
        """
        calls = [(method, argument) for argument in arguments]
        finished = await self.batches.begin(batch_id, calls, per_object * num_objects)
        return self._separate_values(batch_id, finished, per_object, num_objects)

    async def collect_calls(self, batch_id: str, per_object: int, num_objects: int) -> tuple[Any, ...]:
        """Wait for a result of a batch that `begin_calls` has begun; return results that have finished.

        Returns:
            For 1 + `num_objects` object references: a `CollectedCalls`, and sequences of up to `per_object` values,
            None for an error, in the order of the results; those that are not needed are empty tuples.

        Raises:
            Exception: a call raised an error that is not of megarl; the batch is over.
        """
        finished = await self.batches.collect(batch_id, per_object * num_objects)
        return self._separate_values(batch_id, finished, per_object, num_objects)

    async def cancel_calls(self, batch_id: str, indices: Sequence[int]) -> None:
        """Cancel these calls of a batch, whose results are not returned."""
        self.batches.cancel(batch_id, indices)

    async def invoke_with_value(self, call: tuple[str, Any]) -> tuple[Any, Any]:
        """Return the small result and the large value of the call `(method, argument)`."""
        method, argument = call
        result, value = await getattr(self.worker, method)(argument)
        return result, value

    def _separate_values(
        self,
        batch_id: str,
        finished: Sequence[tuple[int, tuple[Any, Any] | MegarlError]],
        per_object: int,
        num_objects: int,
    ) -> tuple[Any, ...]:
        results = tuple((i, outcome if isinstance(outcome, MegarlError) else outcome[0]) for i, outcome in finished)
        values = [None if isinstance(outcome, MegarlError) else outcome[1] for _, outcome in finished]
        join: Callable[[Sequence[Any]], Any] = getattr(self.worker, "join_values", tuple)
        parts = [values[n * per_object : (n + 1) * per_object] for n in range(num_objects)]
        objects = [join(part) if part else () for part in parts]
        return CollectedCalls(results, self.batches.num_ready(batch_id)), *objects

    async def stop(self) -> None:
        """Cancel the calls in progress and shut the worker down, or cancel its construction if it is not built yet."""
        if self.worker is not None:
            await self.batches.close()
            await self.worker.shutdown()
        elif self._building is not None:
            self._building.cancel()
            await asyncio.wait([self._building])
