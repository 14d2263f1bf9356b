"""One episode as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode. Every array has length T: prompt, sampled tokens, tool output, in order.

    Arrays (not lists), so that they cross processes through shared memory without a copy.
    """

    prompt_id: str
    """Identifies the prompt's row in its data source."""

    group_id: int
    """Completions of the same prompt in the same step share it."""

    token_ids: NDArray[np.int32]
    """[T]."""

    loss_mask: NDArray[np.bool_]
    """[T]. True on tokens that the policy sampled; False on prompt and tool output."""

    logprobs: NDArray[np.float32]
    """[T]. As the engine sampled them; 0.0 where loss_mask is False."""

    policy_versions: NDArray[np.int32]
    """[T]. The weights that produced each token (an update may land mid-sequence); -1 where loss_mask is False."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward term -> value, before weighting."""

    reward: float = 0.0
    """The weighted sum of `rewards`."""

    finish_reason: str = "stop"
    """`stop`: the policy ended it; `length`: cut at a limit."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_versions"):
            got = len(getattr(self, name))
            assert got == n, f"{name} has length {got}, token_ids {n}"

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one (all of them where none was sampled)."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data source, tokenized."""

    prompt_id: str
    """`<file name>:<row number from 1>`."""

    text: str
    """What was tokenized, template applied."""

    token_ids: tuple[int, ...]

    row: Mapping[str, Any]
    """The row as it was read: what rewards compare with."""

    answer: str | None = None
    """The reference, where the row has one."""
