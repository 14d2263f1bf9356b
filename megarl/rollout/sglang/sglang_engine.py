"""The SGLang engine behind megarl's engine protocol: token ids in, token ids, log-probabilities and versions out.

An instance belongs in a process of its own (a Ray actor, or a plain script), started with the variables of
`megarl.rollout.sglang.engine_environment.engine_environment`:

    engine = SglangEngine(spec)
    await engine.start()
    generation = await engine.generate(request)
    await engine.shutdown()
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.errors import LostEngineError, WorkerError
from megarl.reshard.layout.layout import Box, WeightLayout
from megarl.reshard.planning.disaggregated import Handover
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket
from megarl.reshard.transfer.process_groups import Meeting
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.rollout.engine_spec import EngineSpec, engine_spec, stop_token_ids
from megarl.rollout.sglang.engine_host import EngineHost
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace
from megarl.rollout.sglang.weight_update.update_session import WeightSession, whole_tensors

__all__ = ["EngineHealth", "EngineSpec", "SglangEngine", "engine_spec", "stop_token_ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """An engine that answers."""

    policy_version: int
    num_requests: int
    """In flight."""
    scheduler_pids: tuple[int, ...]
    """One per TP rank."""


class SglangEngine:
    """Implements `RolloutEngine`. Every method may raise LostEngineError: the engine's processes have ended."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._host = EngineHost(spec)
        self._weights = WeightSession(self._host)
        self._num_requests = 0
        self._num_attempts = 0
        self._in_flight: dict[str, str] = {}
        """By request id, SGLang's of its latest attempt."""
        self._first_completion: float | None = None

    async def start(self) -> None:
        """Return once the engine answers.

        Raises:
            ConfigError: the port is in use, or an argument is none of SGLang's.
            WorkerError: the engine did not come up.
        """
        await self._host.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        """One completion.

        Raises:
            WorkerError: SGLang refused the request (too long, for one), or another one came under its id.
            WeightSyncError: the engine holds a mixture of weights after a sync that failed.
        """
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """One completion each, in order, as soon as all are done; raises as `generate` does."""
        self._weights.check_whole()
        self._num_requests += len(requests)
        try:
            return await self._host.call(self._complete_all(requests))
        finally:
            self._num_requests -= len(requests)

    async def abort(self, request_id: str) -> None:
        """End a request early: it completes with what it has, finish_reason `abort`. Unknown ids are ignored."""
        await self._host.call(self._abort(request_id))

    async def abort_all(self) -> None:
        """End every request early."""
        await self._host.call(self._abort(None))

    async def begin_weights(self) -> None:
        """Stop decoding and open the engine for new weights; requests in flight wait, and go on with them.

        An update that is open already is given up first.
        """
        await self._weights.begin()

    async def load_weights(self, bucket: WeightBucket) -> None:
        """Write the bucket's tensors into every TP rank; see `RolloutEngine.load_weights`."""
        await self._weights.load(bucket)

    async def layouts(self) -> list[WeightLayout]:
        """What each TP rank holds, by rank: read off its own loader; see `weight_layout.engine_trace`.

        Raises:
            WeightSyncError: the model loads in a way that boxes cannot express.
        """
        return [trace.layout for trace in await self.traces()]

    async def traces(self) -> list[EngineTrace]:
        """The layouts, with padding and with what must come through `load_weights`; raises as `layouts` does."""
        return await self._weights.traces()

    async def whole_tensors(self) -> tuple[str, ...]:
        """See `RolloutEngine.whole_tensors`; raises as `layouts` does."""
        return whole_tensors(await self.traces())

    async def load_boxes(self, tp_rank: int, index: int, bucket: BoxBucket | None) -> None:
        """Write one TP rank's part of round `index`; see `RolloutEngine.load_boxes`."""
        await self._weights.load_boxes(tp_rank, index, bucket)

    async def prepare_receive(self, handover: Handover, engine: int) -> None:
        """Plan what the TP ranks receive; see `RolloutEngine.prepare_receive`."""
        await self._weights.prepare(handover, engine)

    async def join_trainer(self, meeting: Meeting) -> None:
        """Connect the TP ranks with the trainer's; see `RolloutEngine.join_trainer`."""
        await self._weights.join(meeting)

    async def receive_weights(self) -> list[SyncStats]:
        """Have the TP ranks receive the model; see `RolloutEngine.receive_weights`."""
        return await self._weights.receive()

    async def piece_hashes(self) -> list[dict[tuple[str, Box], bytes]]:
        """By TP rank: tensor and box of each piece of its layout -> `digest` of what its parameter holds."""
        return await self._weights.piece_hashes()

    async def end_weights(self, policy_version: int) -> None:
        """Take the version and decode again; see `RolloutEngine.end_weights`."""
        await self._weights.end(policy_version)

    async def abort_weights(self) -> None:
        """Give an open update up. The engine decodes again, unless something was written."""
        await self._weights.abort()

    async def randomize_weights(self) -> None:
        """Overwrite every parameter with noise: after a sync, nothing of it may be left."""
        await self._host.call(self._randomize())

    async def read_weights(self, directory: str) -> None:
        """Every TP rank saves its parameters and its buffers: torch files, name -> tensor.

        Args:
            directory: where `rank<r>.pt` and `rank<r>.buffers.pt` go.
        """
        await self._weights.dump(directory)

    async def health(self) -> EngineHealth:
        """What the engine is at; asks the schedulers, and so waits for the step that they are in."""
        await self._host.call(self._host.tokenizer_manager.get_internal_state())
        pids = tuple(p.pid or 0 for p in self._host.processes)
        return EngineHealth(
            policy_version=self._weights.policy_version, num_requests=self._num_requests, scheduler_pids=pids
        )

    async def watch(self) -> LostEngineError:
        """How the engine has ended, once it has."""
        try:
            await self._host.watch()
        except LostEngineError as error:
            return error

    async def beat(self) -> LostEngineError | None:
        """None once the engine has given a sign of life (see `EngineHost.beat`), or how it has ended."""
        try:
            await self._host.beat()
        except LostEngineError as error:
            return error
        return None

    async def first_completion(self) -> float | None:
        """When the first one was finished, in Unix time; None before."""
        return self._first_completion

    async def shutdown(self) -> None:
        """End the engine's processes; requests in flight are lost. May be called twice."""
        await self._host.stop()

    async def _complete_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        if len(requests) == 1:
            return [await self._complete(requests[0])]
        tasks = [asyncio.ensure_future(self._complete(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, request: GenerationRequest) -> Generation:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = request.sampling
        # SGLang's default is one fixed seed, under which all samples of a prompt would be the same
        seed = secrets.randbelow(2**31) if sampling.seed is None else sampling.seed
        attempt = self._attempt(request.request_id)
        work = GenerateReqInput(
            rid=attempt,
            input_ids=list(request.token_ids),
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": sampling.max_new_tokens,
                "sampling_seed": seed,
                "stop_token_ids": list(self._spec.stop_token_ids),
            },
            return_logprob=True,
        )
        try:
            answer = await anext(self._host.tokenizer_manager.generate_request(work, None))
        except (ValueError, HTTPException) as e:  # an HTTPException is SGLang's word for its own overload
            raise WorkerError(f"request {request.request_id}: {e}") from e
        finally:
            is_latest = self._in_flight.get(request.request_id) == attempt
            if is_latest:
                del self._in_flight[request.request_id]
        if not is_latest:
            raise WorkerError(f"request {request.request_id} was asked again")
        if self._first_completion is None:
            self._first_completion = time.time()
        return self._generation(answer)

    def _attempt(self, request_id: str) -> str:
        """A name for SGLang, which takes none twice; whoever asked under this id before is gone, or has given up."""
        if request_id in self._in_flight:
            self._host.tokenizer_manager.abort_request(rid=self._in_flight[request_id])
        self._num_attempts += 1
        # SGLang aborts all that begin with the name: none is the beginning of another
        self._in_flight[request_id] = attempt = f"{request_id}#{self._num_attempts}."
        return attempt

    def _generation(self, answer: dict[str, Any]) -> Generation:
        meta = answer["meta_info"]
        sampled = meta.get("output_token_logprobs") or []
        versions = np.full(len(sampled), self._weights.policy_version, np.int32)
        for span in meta.get("weight_versions") or []:
            versions[span["start"] : span["end"]] = int(span["version"])
        return Generation(
            token_ids=np.array([token for _, token, *_ in sampled], np.int32),
            logprobs=np.array([logprob for logprob, *_ in sampled], np.float32),
            policy_versions=versions,
            finish_reason=meta["finish_reason"]["type"],
        )

    async def _randomize(self) -> None:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        check = CheckWeightsReqInput(action="reset_tensors")
        ok, message, *_ = await self._host.tokenizer_manager.check_weights(check)
        if not ok:
            raise WorkerError(f"the engine's weights could not be overwritten: {message}")

    async def _abort(self, request_id: str | None) -> None:
        manager = self._host.tokenizer_manager
        if request_id is None:
            manager.abort_request(abort_all=True)
        elif request_id in self._in_flight:
            manager.abort_request(rid=self._in_flight[request_id])
