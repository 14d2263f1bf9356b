"""The agent interface, and how an agent is loaded from the import path in `rollout.agent`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from megarl.batch.trajectory import TIME_LIMIT, Trajectory, count_turns
from megarl.config.rollout import AgentConfig
from megarl.config.section import load_object
from megarl.data.tokenizer import describe_unknown_token, read_vocab_size
from megarl.errors import AgentError, ConfigError, MegarlError
from megarl.rollout.agents.episode import Episode, RefusedTextError
from megarl.rollout.environments.conversation import EnvironmentFailedError
from megarl.text import describe_error
from megarl.user_code import CallOutcome, await_outcome, outcome_of

Agent: TypeAlias = Callable[[Episode], Awaitable[Trajectory | Sequence[Trajectory]]]
"""Runs one episode and returns its trajectory, or after forks its trajectories; the rollout worker adds the rewards.

Many episodes run at the same time in one worker, so an agent keeps what belongs to an episode in local variables.
"""

METHOD = "run"
"""The method that runs an episode, if the agent is a class."""

_PATH, _KWARGS = "rollout.agent.path", "rollout.agent.kwargs"


def load_agent(config: AgentConfig) -> Agent:
    """Import the agent and apply its keyword arguments; creates the instance if the agent is a class.

    Raises:
        ConfigError: as `check_agent`, or the class's constructor raised an exception.
    """
    agent = check_agent(config)
    if not isinstance(agent, type):
        return partial(agent, **config.kwargs)
    instance, error = outcome_of(partial(agent, **config.kwargs))
    if error is not None:
        raise ConfigError(f"{_PATH}: creating {config.path} raised {describe_error(error)}") from error
    return cast("Agent", getattr(instance, METHOD))


def check_agent(config: AgentConfig) -> type | Callable[..., Awaitable[Trajectory | Sequence[Trajectory]]]:
    """Import the agent and return it after checking its signature: an async function, or a class that is not created.

    Raises:
        ConfigError: the agent cannot be imported, is neither an async function nor a class with an async method `run`,
            or does not take the keyword arguments.
    """
    agent = load_object(config.path, key=_PATH, kind="agent")
    if isinstance(agent, type):
        method = getattr(agent, METHOD, None)
        if not inspect.iscoroutinefunction(method):
            raise ConfigError(
                f"{_PATH} needs a class with the method `async def run(self, episode)`, got {config.path}"
            )
        _require_call(method, (None, None), {}, f"{_PATH}: {config.path}.{METHOD}", "needs to take an episode")
        _require_call(agent, (), config.kwargs, f"{_KWARGS}: {config.path}", "does not take these arguments")
        return agent
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"{_PATH} needs an async function or a class, got {config.path} = {agent!r}")
    _require_call(agent, (None,), {}, f"{_PATH}: {config.path}", "needs to take an episode", partially=True)
    _require_call(agent, (None,), config.kwargs, f"{_KWARGS}: {config.path}", "does not take these arguments")
    return agent


def _require_call(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    kwargs: dict[str, object],
    subject: str,
    complaint: str,
    *,
    partially: bool = False,
) -> None:
    """Return if the function can be called with the arguments.

    Args:
        partially: further arguments may be missing.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature
        return
    try:
        (signature.bind_partial if partially else signature.bind)(*arguments, **kwargs)
    except TypeError as e:
        raise ConfigError(f"{subject}{signature} {complaint}: {e}") from e


GRACE_SECONDS = 20.0
"""How long an agent may take after the time limit of its episode, of which the engine may take half to abort a request
in progress."""

CANCEL_SECONDS = 5.0
"""How long an agent that is cancelled may take to clean up."""


async def run_agent(
    agent: Agent, episode: Episode, *, path: str, refuses_forks: str | None = None, key: str = "rollout.agent.path"
) -> list[Trajectory]:
    """Return the agent's trajectories of the episode, one for each of its segments.

    Args:
        path: import path of the agent, for error messages.
        refuses_forks: why the algorithm cannot train on an episode of several segments; None: it can.
        key: YAML path of the import path.

    Raises:
        EngineFailedError: as `Episode.generate`.
        AgentError: the agent raised another exception, or returned something other than a valid trajectory.
        RefusedTextError: a text that it continued with cannot be used.
        EnvironmentFailedError: nothing was sampled within the time limit.
    """
    label = f"{key} ({path})"
    result, error = await _run(agent, episode)
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
    if episode.limit_reached.done() and not any(np.any(trajectory.loss_mask) for trajectory in segments):
        raise EnvironmentFailedError(f"{label} sampled nothing within its time limit (rollout.request_timeout_seconds)")
    return cast("list[Trajectory]", segments)


async def _run(agent: Agent, episode: Episode) -> CallOutcome:
    """Return what the agent returns or raises; the tokens so far if it fails, or does not end, after the time limit."""
    task, reached = asyncio.ensure_future(await_outcome(partial(agent, episode))), episode.limit_reached
    ends: list[asyncio.Future[Any]] = [task, reached]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not episode.ends_by_itself:
            await episode.clock.wait([task], GRACE_SECONDS)
        elif not task.done():
            await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    result, error = task.result() if task.done() else (None, None)
    has_failed = error is not None and not isinstance(error, MegarlError)
    if task.done() and not (has_failed and reached.done()):
        return result, error
    task.cancel()
    await asyncio.wait([task], timeout=CANCEL_SECONDS)
    episode.finish_reason = TIME_LIMIT
    return episode.trajectories(), None


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
