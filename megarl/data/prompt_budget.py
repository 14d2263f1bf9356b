"""Maximum prompt length that a model's context allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import RunConfig
from megarl.config.data import Source
from megarl.errors import ConfigError


def resolve_max_prompt_tokens(config: RunConfig, hf_config: Mapping[str, Any], source: Source) -> int:
    """Return the maximum prompt length of a source in tokens.

    This is its `max_prompt_tokens` if set, else the context length minus `rollout.max_new_tokens`.

    Args:
        hf_config: content of the model's config.json.

    Raises:
        ConfigError: prompt and completion together exceed the model's context.
    """
    context, completion = int(hf_config["max_position_embeddings"]), config.rollout.max_new_tokens
    prompt, key = source.config.max_prompt_tokens, f"{source.key}.max_prompt_tokens"
    if prompt is None:
        if completion >= context:
            raise ConfigError(
                f"rollout.max_new_tokens: needs to leave room for a prompt in the model's max_position_embeddings = "
                f"{context}, got {completion}, {context} - {completion} = {context - completion}"
            )
        return context - completion
    if prompt + completion > context:
        raise ConfigError(
            f"{key}: prompt and completion need to fit the model's max_position_embeddings = "
            f"{context}, got {key} + rollout.max_new_tokens = {prompt} + {completion} = "
            f"{prompt + completion}"
        )
    return prompt
