"""The simplest agent: one completion of the prompt."""

from __future__ import annotations

import numpy as np

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.rollout.engine import GenerationEngine, GenerationRequest, Sampling


async def single_turn(
    prompt: Prompt, engine: GenerationEngine, sampling: Sampling, *, request_id: str, group_id: int
) -> Trajectory:
    """Sample one completion and return the prompt tokens followed by the sampled ones; implements `Agent`."""
    generation = await engine.generate(
        GenerationRequest(request_id=request_id, token_ids=prompt.token_ids, sampling=sampling)
    )
    given, sampled = len(prompt.token_ids), len(generation.token_ids)
    return Trajectory(
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        token_ids=np.concatenate([np.array(prompt.token_ids, np.int32), generation.token_ids]),
        loss_mask=np.repeat([False, True], [given, sampled]),
        logprobs=np.concatenate([np.zeros(given, np.float32), generation.logprobs]),
        policy_versions=np.concatenate([np.full(given, -1, np.int32), generation.policy_versions]),
        finish_reason=generation.finish_reason,
    )
