"""Continues a completion that was interrupted with a new request, whose prompt ends with the tokens sampled so far.

    request          prompt                      max_new_tokens = 8
    interrupted      prompt | a b c
    new request      prompt + a b c              max_new_tokens = 5, same id and seed
    its completion                    d e
    joined           prompt | a b c   d e        log-probabilities and versions of both parts

The noise that an engine samples with is a function of the seed and the position in the sequence, so that a
deterministic engine samples the tokens that it would have sampled without the interruption. Their log-probabilities
may differ by rounding: the keys and values of a, b and c are computed in one pass instead of token by token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megarl.rollout.engine import UNFINISHED, Generation, GenerationRequest


def continue_after(request: GenerationRequest, part: Generation) -> GenerationRequest:
    """Return the request for what is left of a completion of `request` after its first tokens, `part`."""
    left = request.sampling.max_new_tokens - len(part.token_ids)
    assert left > 0, f"a completion of {len(part.token_ids)} tokens has ended"
    return replace(
        request,
        token_ids=(*request.token_ids, *part.token_ids.tolist()),
        sampling=replace(request.sampling, max_new_tokens=left),
    )


def join(part: Generation, rest: Generation) -> Generation:
    """Return the completion that consists of its first tokens, `part`, and the rest, with which it ends."""
    return Generation(
        token_ids=np.concatenate([part.token_ids, rest.token_ids]),
        logprobs=np.concatenate([part.logprobs, rest.logprobs]),
        policy_versions=np.concatenate([part.policy_versions, rest.policy_versions]),
        finish_reason=rest.finish_reason,
    )


def no_tokens() -> Generation:
    """Return the first tokens of a completion of which none was sampled yet."""
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason=UNFINISHED,
    )


def tokens_from(generation: Generation, start: int) -> Generation:
    """Return the tokens of a completion from `start` on."""
    return replace(
        generation,
        token_ids=generation.token_ids[start:],
        logprobs=generation.logprobs[start:],
        policy_versions=generation.policy_versions[start:],
    )
