"""Check of the agent: its import path, its kind and its keyword arguments."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.run import RunConfig
from megarl.errors import ConfigError
from megarl.rollout.agents.agent import check_agent


def find_agent_problems(config: RunConfig) -> Iterator[str]:
    """Find out whether the agent cannot be imported or called; a class is not created."""
    try:
        check_agent(config.rollout.agent)
    except ConfigError as e:
        yield str(e)
    if config.algorithm.advantages_per == "turn" and config.reward.environment_weight is None:
        yield (
            "algorithm.advantages_per: turn needs a term of type environment in reward.terms, which adds up the "
            f"rewards of turns, got {', '.join(config.reward.terms)}"
        )
