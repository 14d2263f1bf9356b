"""Engines outside the package: what one implements, and the host that runs it in a process of its own.

`rollout.engine.type: package.module:Class` names one. megarl's own engine, SGLang, receives shards and spans nodes; a
custom engine gets full tensors under their Hugging Face names, which `weight_sync.strategy: gather_hf` sends.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

import numpy as np

from megarl.cluster.workers.dispatch import CallBatches
from megarl.config.rollout import EngineConfig
from megarl.config.section import load_class
from megarl.engines.engine import (
    EngineMemory,
    EngineUpdate,
    FinishedRequest,
    Generation,
    GenerationRequest,
    UpdateReport,
    no_tokens,
)
from megarl.errors import ConfigError, LostEngineError, WeightSyncError, WorkerError
from megarl.text import describe_error
from megarl.user_code import CallOutcome, await_outcome, outcome_of

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.engines.engine_spec import EngineSpec
    from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
    from megarl.reshard.transfer.bucket import WeightBucket


class Engine(Protocol):
    """An engine outside the package, created as `Class(spec, **rollout.engine.kwargs)`.

        class Echo:
            def __init__(self, spec):
                self._eos = spec.stop_token_ids[0]

            async def start(self):
                pass

            async def generate(self, request):
                ids = np.array([request.token_ids[-1], self._eos], np.int32)
                zeros = np.zeros(2, np.float32)
                versions = np.zeros(2, np.int32)
                return Generation(token_ids=ids, logprobs=zeros, policy_versions=versions, finish_reason="stop")

            def load_weights(self, tensors):
                pass

            async def shutdown(self):
                pass

    Requests run at the same time in one event loop. None is in flight while weights are loaded.
    """

    async def start(self) -> None:
        """Become ready to generate with the weights in `spec.model_path`."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return one completion; megarl sets `policy_versions`. Cancelled if nobody needs it any more."""
        ...

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy some of the tensors of the next weights, which are views of memory that others then overwrite."""
        ...

    async def shutdown(self) -> None:
        """Release what the engine holds."""
        ...


METHODS = {"start": 0, "generate": 1, "load_weights": 1, "shutdown": 0}
"""Methods of an engine, and the number of their arguments."""

KEY = "rollout.engine"


def check_engine(config: EngineConfig) -> Callable[..., Engine]:
    """Import the class of `rollout.engine.type` and return it after checking its methods; no object is created.

    Raises:
        ConfigError: it cannot be imported, is no class, lacks a method, or does not take the keyword arguments.
    """
    found = load_class(config.type, key=f"{KEY}.type")
    for name, num_arguments in METHODS.items():
        method = getattr(found, name, None)
        if not callable(method):
            needs = f"a class with the methods {', '.join(METHODS)}"
            raise ConfigError(f"{KEY}.type needs {needs}, {config.type} has no {name}")
        if (name == "load_weights") == inspect.iscoroutinefunction(method):
            kind = "a plain" if name == "load_weights" else "an async"
            raise ConfigError(f"{KEY}.type: {config.type}.{name} needs to be {kind} method")
        try:
            inspect.signature(method).bind(*[None] * (num_arguments + 1))
        except TypeError as e:
            raise ConfigError(f"{KEY}.type: {config.type}.{name} needs to take {num_arguments} arguments: {e}") from e
    try:
        inspect.signature(found).bind(None, **config.kwargs)
    except TypeError as e:
        raise ConfigError(f"{KEY}.kwargs: {config.type} does not take a spec and these arguments: {e}") from e
    return cast("Callable[..., Engine]", found)


class CustomEngineHost:
    """The methods of `RolloutEngine` for a custom engine; its exceptions become failures of single calls."""

    def __init__(self, spec: EngineSpec, config: EngineConfig) -> None:
        """Create the engine.

        Raises:
            ConfigError: as `check_engine`, or its constructor raised an exception.
        """
        # imports torch, which checks of a configuration do without
        from megarl.engines.update_runner import UpdateRunner

        self._name = config.type
        engine, error = outcome_of(partial(check_engine(config), spec, **config.kwargs))
        if error is not None:
            raise ConfigError(f"{KEY}: creating {config.type} raised {describe_error(error)}") from error
        self.engine: Engine = engine
        self._policy_version = spec.policy_version
        self._running: dict[str, asyncio.Task[CallOutcome]] = {}
        """By request id."""
        self._batches = CallBatches[GenerationRequest, Generation](self._complete)
        self._may_generate = asyncio.Event()
        self._may_generate.set()
        self._is_open, self._closed_reason = False, ""
        self._is_mixed = False
        """Whether the engine may hold parts of two versions, after an update that failed."""
        self.sync_seconds = spec.round_timeout_seconds
        """Timeout of waits for other processes, in seconds."""
        self._update = UpdateRunner(self)
        self._ended: asyncio.Future[LostEngineError] = asyncio.get_running_loop().create_future()
        self._first_completion: float | None = None

    async def start(self) -> None:
        """Start the engine; raises WorkerError if it fails."""
        _, error = await await_outcome(self.engine.start)
        if error is not None:
            raise WorkerError(f"{self._name}.start raised {describe_error(error)}") from error

    async def begin_requests(self, batch_id: str, requests: Sequence[GenerationRequest]) -> list[FinishedRequest]:
        """Begin a batch of requests; return its first completions, see `CallBatches`."""
        return await self._batches.begin(batch_id, requests)

    async def finished_requests(self, batch_id: str) -> list[FinishedRequest]:
        """Return the next completions of a batch."""
        return await self._batches.collect(batch_id)

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one completion per request, in order."""
        return list(await asyncio.gather(*map(self._complete, requests)))

    async def _complete(self, request: GenerationRequest) -> Generation:
        """Return the completion of a request, once no update is open.

        Raises:
            WorkerError: the engine raised an exception, or returned no completion.
            WeightSyncError: the engine holds parts of two versions.
        """
        while not self._may_generate.is_set():  # another update may begin before this task continues
            await self._may_generate.wait()
        if self._is_mixed:
            raise WeightSyncError(f"{self._name} needs a complete update before it can generate: {self._closed_reason}")
        version = self._policy_version
        await self.abort(request.request_id)  # a request of that id whose answer was lost
        task = asyncio.ensure_future(await_outcome(partial(self.engine.generate, request)))
        self._running[request.request_id] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()  # if the caller was cancelled
            if self._running.get(request.request_id) is task:
                del self._running[request.request_id]
        if task.cancelled():
            return replace(no_tokens(), finish_reason="abort")
        generation, error = task.result()
        if error is not None:
            raise WorkerError(f"{self._name}.generate raised {describe_error(error)}") from error
        problem = _find_problem(generation, request)
        if problem:
            raise WorkerError(f"{self._name}.generate: {problem}")
        assert isinstance(generation, Generation)
        self._first_completion = self._first_completion or time.time()
        return replace(
            generation,
            token_ids=np.asarray(generation.token_ids, np.int32),
            logprobs=np.asarray(generation.logprobs, np.float32),
            policy_versions=np.full(len(generation.token_ids), version, np.int32),
        )

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        """Return an entry without tokens for each request in flight: the engine's event loop answers."""
        del known
        return dict.fromkeys(self._running, no_tokens())

    async def abort(self, request_id: str) -> None:
        """End a request early, with no token; unknown ids are ignored."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def abort_groups(self, request_ids: Sequence[str]) -> None:
        """End all requests of these groups early, whose ids begin with that of the group and a `-`."""
        prefixes = tuple(f"{request_id}-" for request_id in request_ids)
        for request_id in [name for name in self._running if name.startswith(prefixes)]:
            await self.abort(request_id)

    async def abort_all(self) -> None:
        """End all requests in flight early."""
        for request_id in list(self._running):
            await self.abort(request_id)

    async def begin_weights(self) -> None:
        """Hold new requests, wait for those in flight, and open an update."""
        await self.begin()

    async def begin(self) -> None:
        """Hold new requests, wait for those in flight, and open an update; one that is open is aborted."""
        await self.close("another update began")
        self._may_generate.clear()
        while self._running:
            await asyncio.wait(list(self._running.values()))
            await asyncio.sleep(0)  # their callers remove them
        self._is_open = True

    async def load_weights(self, bucket: WeightBucket) -> None:
        """Let the engine copy the tensors of a bucket.

        Raises:
            WeightSyncError: the engine raised an exception; the update is closed.
        """
        from megarl.reshard.transfer.bucket import open_bucket

        self.check_open()
        self._is_mixed = True
        _, error = await asyncio.to_thread(outcome_of, partial(self.engine.load_weights, open_bucket(bucket)))
        if error is not None:
            problem = f"{self._name}.load_weights raised {describe_error(error)}"
            await self.close(problem)
            raise WeightSyncError(problem) from error

    async def update_weights(self, update: EngineUpdate) -> UpdateReport:
        """Run a weight update; see `RolloutEngine.update_weights`."""
        return await self._update.run(update)

    async def receive(self, delta: DeltaUpdate | None) -> list[SyncStats]:
        """Refuse boxes: the configuration has `gather_hf`."""
        del delta
        self._refuse_boxes()

    def check_open(self) -> None:
        """Raise WeightSyncError if no update is open."""
        if not self._is_open:
            raise WeightSyncError(f"the update was closed: {self._closed_reason or 'begin_weights comes first'}")

    async def end(self, policy_version: int) -> None:
        """Serve the new weights."""
        self.check_open()
        self._policy_version, self._is_open, self._is_mixed, self._closed_reason = policy_version, False, False, ""
        self._may_generate.set()

    async def close(self, reason: str) -> None:
        """Abort the update, if one is open; requests fail until the next one if tensors were loaded."""
        if self._is_open:
            self._is_open, self._closed_reason = False, reason
            self._may_generate.set()

    async def abort_update(self, reason: str) -> None:
        """Close the update, if it is open."""
        await self.close(reason)

    async def weight_needs(self) -> NoReturn:
        """Refuse boxes: the configuration has `gather_hf`."""
        self._refuse_boxes()

    def _refuse_boxes(self) -> NoReturn:
        raise WeightSyncError(f"{self._name} takes full tensors only: set weight_sync.strategy: gather_hf")

    async def release(self, memory: Sequence[EngineMemory]) -> None:
        """Do nothing: a custom engine keeps its memory."""

    async def resume(self, memory: Sequence[EngineMemory]) -> None:
        """Do nothing: a custom engine keeps its memory."""

    async def watch(self) -> LostEngineError:
        """Wait until the engine ends, and return the reason."""
        return await asyncio.shield(self._ended)

    async def ping(self) -> LostEngineError | None:
        """Return None: the event loop of the engine answers."""
        return self._ended.result() if self._ended.done() else None

    async def first_completion_time(self) -> float | None:
        """Return the Unix time when the first completion was finished; None before that."""
        return self._first_completion

    async def shutdown(self) -> None:
        """Stop the engine; requests in flight are lost."""
        if not self._ended.done():
            self._ended.set_result(LostEngineError(f"{self._name} was shut down"))
            await await_outcome(self.engine.shutdown)


def _find_problem(generation: object, request: GenerationRequest) -> str:
    """Return what is wrong with a completion; empty: nothing."""
    if not isinstance(generation, Generation):
        return f"needs to return a Generation, got {type(generation).__name__}"
    tokens, logprobs = np.asarray(generation.token_ids), np.asarray(generation.logprobs)
    if tokens.ndim != 1 or tokens.shape != logprobs.shape:
        return f"needs one log-probability per token, got shapes {tokens.shape} and {logprobs.shape}"
    if len(tokens) > request.sampling.max_new_tokens:
        return f"returned {len(tokens)} tokens, but at most {request.sampling.max_new_tokens} were asked for"
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        return "returned a log-probability that is not a finite number of at most 0"
    if generation.finish_reason not in ("stop", "length"):
        return f"finish_reason needs to be stop or length, got {generation.finish_reason!r}"
    return ""
