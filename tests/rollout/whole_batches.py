"""What fake engines share: streams that complete all requests of a call together, completions, and jobs."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.batch.trajectory import Prompt, ScoredGroup, Trajectory
from megarl.engines.engine import FinishedRequest, Generation, GenerationRequest, Sampling
from megarl.rollout.rollout_worker import GroupJob


class WholeBatches:
    """Base class of fake engines with `generate` or `generate_many`."""

    async def generate(self, request: GenerationRequest) -> Generation:
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*map(self.generate, requests)))

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        yield list(enumerate(await self.generate_many(requests)))

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        return {}

    async def abort(self, request_id: str) -> None:
        raise AssertionError(request_id)


class NoScores:
    async def score(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> ScoredGroup:
        return ScoredGroup(trajectories=trajectories)


def make_generation(token_ids: Any, logprobs: Any = -0.5, versions: Any = 0, reason: str = "stop") -> Generation:
    """Return a completion; `logprobs` and `versions`: of each token, or of all."""
    count = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.broadcast_to(np.array(logprobs, np.float32), count).copy(),
        policy_versions=np.broadcast_to(np.array(versions, np.int32), count).copy(),
        finish_reason=reason,
    )


def make_group_job(
    prompt: Prompt | None = None, *, group_id: int = 3, max_new_tokens: int = 1000, **changes: Any
) -> GroupJob:
    """Return a job with the temperature 1; `changes`: further fields."""
    fields = {"num_samples": 2, "seed": (0, 1), "request_id": f"step-1-{group_id}", **changes}
    return GroupJob(
        prompt=prompt or Prompt(prompt_id=f"train.jsonl:{group_id}", text="", token_ids=(5, 6, 7), row={}),
        group_id=group_id,
        sampling=Sampling(temperature=1.0, max_new_tokens=max_new_tokens),
        **fields,
    )


def token_routes(token_ids: Any) -> Any:
    """Return routes through 2 layers that tell the tokens, uint16 [n, 2, 2]."""
    ids = np.asarray(token_ids, np.uint16)
    return np.stack([ids, ids + 1, ids + 2, ids], axis=1).reshape(-1, 2, 2)


def with_routes(generation: Generation, request: GenerationRequest) -> Generation:
    """Return a generation with the routes that an engine returns with it."""
    token_ids = [*request.token_ids, *generation.token_ids.tolist()]
    return replace(generation, routes=token_routes(token_ids)[request.num_routed : -1])
