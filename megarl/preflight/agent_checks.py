"""Checks of what runs an episode: the agent, environment or harness, and the chat template that the latter two need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.harness import HarnessConfig
from megarl.config.rollout import AgentConfig, EnvironmentConfig
from megarl.config.run import RunConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.rollout.agents.agent import check_agent
from megarl.rollout.environments.conversation import require_chat_template
from megarl.rollout.environments.load_environment import check_environment
from megarl.rollout.gateway.program import HARNESS, check_harness


def find_agent_problems(config: RunConfig) -> Iterator[str]:
    """Find out whether the agent, environment or harness cannot be imported or called; a class is not created."""
    try:
        check_agent(config.rollout.agent)
    except ConfigError as e:
        yield str(e)
    for key, env in config.environments.items():
        try:
            check_environment(env, key)
        except ConfigError as e:
            yield str(e)
        yield from _find_template_problems(config, env, key)
    harness = config.rollout.harness
    if harness is not None:
        try:
            check_harness(harness)
        except ConfigError as e:
            yield str(e)
        yield from _find_template_problems(config, harness, HARNESS)
    terms = config.reward.environments
    if terms and not config.environments and harness is None and config.rollout.agent == AgentConfig():
        yield (
            f"reward.terms.{terms[0]} is of type environment, which needs rollout.env, or an agent or harness that "
            "gives rewards of turns"
        )
    if config.algorithm.advantages_per == "turn" and not terms:
        yield (
            "algorithm.advantages_per: turn needs a term of type environment in reward.terms, which adds up the "
            f"rewards of turns, got {', '.join(config.reward.terms)}"
        )


def _find_template_problems(config: RunConfig, section: EnvironmentConfig | HarnessConfig, key: str) -> Iterator[str]:
    run_by_default = config.rollout.env or config.rollout.harness
    for source in config.data.resolved_sources:
        is_used = (source.config.env or run_by_default) is section
        if is_used and source.config.chat_template == "never":
            yield f"{key} needs a chat template, got {source.key}.chat_template: never"
    if not Path(config.model.path).is_dir():
        return  # reported with the model
    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        refuses_forks = config.algorithm.refuses_forks
        require_chat_template(
            tokenizer, config.data.template_date, forks=section.forks, refuses_forks=refuses_forks, key=key
        )
    except DataError as e:
        yield str(e)
