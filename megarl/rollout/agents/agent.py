"""The agent interface, and how an agent is loaded from the import path in `rollout.agent`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, cast

from megarl.batch.trajectory import Trajectory
from megarl.config.import_path import load_object
from megarl.config.rollout import AgentConfig
from megarl.errors import ConfigError
from megarl.rollout.agents.episode import Episode
from megarl.text import describe_error
from megarl.user_code import outcome_of

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
