"""Tokenized prompts and trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode of T tokens: prompt, sampled tokens and tool output, in order.

    Arrays rather than lists, so that they are transferred between processes through shared memory without a copy.
    """

    prompt_id: str
    """Identifier of the prompt's row in its data source."""

    group_id: int
    """Index shared by the completions of the same prompt in the same step."""

    token_ids: NDArray[np.int32]
    """[T]: ids of all tokens of the episode."""

    loss_mask: NDArray[np.bool_]
    """[T]: True for tokens that the policy sampled, False for prompt and tool output."""

    logprobs: NDArray[np.float32]
    """[T]: log-probabilities from the rollout engine; 0.0 where loss_mask is False."""

    policy_versions: NDArray[np.int32]
    """[T]: version of the weights that sampled each token (weights may be updated mid-sequence); -1 where loss_mask is
    False."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward term -> value, before weighting; `<term>/<name>` -> further value of a term, which is only logged."""

    reward: float = 0.0
    """Weighted sum of the terms; 0 if it is dropped."""

    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Reward term -> error message, for terms that failed on this completion (`on_error: drop`). If there are any, the
    completion is dropped: it takes no part in estimates, metrics and training."""

    finish_reason: str = "stop"
    """`stop`: ended by the policy; `length`: truncated at a token limit."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_versions"):
            got = len(getattr(self, name))
            assert got == n, f"{name} has length {got}, token_ids {n}"

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one; T if none was sampled."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized row of a data source."""

    prompt_id: str
    """`<file name>:<row number from 1>`."""

    text: str
    """The tokenized text, with the template applied."""

    token_ids: tuple[int, ...]

    row: Mapping[str, Any]
    """The row as read, for reward functions."""

    answer: str | None = None
    """Reference answer, if the row has one."""
