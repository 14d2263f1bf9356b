"""Runs an agent on an episode: turns its exceptions into errors that name it, and checks its trajectory."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from megarl.batch.trajectory import Trajectory, count_turns
from megarl.data.tokenizer import describe_unknown_token, read_vocab_size
from megarl.errors import AgentError, MegarlError
from megarl.rollout.agents.agent import Agent
from megarl.rollout.agents.episode import Episode, RefusedTextError
from megarl.text import describe_error
from megarl.user_code import await_outcome


async def run_agent(
    agent: Agent, episode: Episode, *, path: str, refuses_forks: str | None = None, key: str = "rollout.agent.path"
) -> list[Trajectory]:
    """Return the agent's trajectories of the episode, one for each of its segments.

    Args:
        path: import path of the agent, for error messages.
        refuses_forks: why the algorithm cannot train on an episode of several segments; None: it can.
        key: YAML path of the import path.

    Raises:
        WorkerError: the engine rejected a request.
        AgentError: the agent raised another exception, or returned something other than a valid trajectory.
        RefusedTextError: a text that it continued with cannot be used.
    """
    label = f"{key} ({path})"
    result, error = await await_outcome(partial(agent, episode))
    if isinstance(error, MegarlError):
        raise error
    if error is not None:
        raise AgentError(f"{label} raised {describe_error(error)} on {episode.prompt.prompt_id}") from error
    segments = list(result) if isinstance(result, list | tuple) and result else [result]
    problem: str | None = None
    for number, trajectory in enumerate(segments):
        if not isinstance(trajectory, Trajectory):
            raise AgentError(
                f"{label} needs to return a trajectory, got {type(trajectory).__name__} on {episode.prompt.prompt_id}"
            )
        problem = problem or _find_problem(trajectory, number, episode)
    if len(segments) > 1 and refuses_forks is not None:
        problem = problem or f"is one of {len(segments)} of its episode, but {refuses_forks}"
    if problem is not None:
        raise AgentError(f"{label} returned a trajectory that {problem}, on {episode.prompt.prompt_id}")
    for trajectory in cast("list[Trajectory]", segments):
        token_ids = trajectory.token_ids.tolist()
        unknown = describe_unknown_token(episode.tokenizer, token_ids, read_vocab_size(episode.tokenizer))
        if unknown is not None:
            raise RefusedTextError(f"{label} returned a trajectory on {episode.prompt.prompt_id}: {unknown}")
    return cast("list[Trajectory]", segments)


def _find_problem(trajectory: Trajectory, number: int, episode: Episode) -> str | None:
    """Return what is wrong with a trajectory that an agent has made, which may not be that of the episode."""
    expected = episode.prompt.prompt_id, episode.group_id
    got = trajectory.prompt_id, trajectory.group_id
    if got != expected:
        return f"belongs to another prompt: prompt_id, group_id need to be {expected}, got {got}"
    if trajectory.segment != number:
        return f"is number {number} of its episode: its segment needs to be {number}, got {trajectory.segment}"
    if trajectory.turn_rewards and len(trajectory.turn_rewards) != count_turns(trajectory.loss_mask):
        return (
            f"needs a reward for each of its {count_turns(trajectory.loss_mask)} turns, got "
            f"{len(trajectory.turn_rewards)} turn_rewards"
        )
    if trajectory.num_tokens == 0 or trajectory.loss_mask[0]:
        return "has no token before its first sampled one"
    if trajectory.num_tokens > episode.max_num_tokens:
        prompt = len(episode.prompt.token_ids)
        return (
            f"is too long: it may have prompt + rollout.max_new_tokens = {prompt} + {episode.max_num_tokens - prompt} "
            f"= {episode.max_num_tokens} tokens, got {trajectory.num_tokens}"
        )
    if np.any(trajectory.logprobs[~trajectory.loss_mask]):
        return "has log-probabilities for tokens that were not sampled"
    return None
