"""The interface of an environment: messages in, messages and rewards out, one object per episode."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from megarl.batch.trajectory import Prompt

Message: TypeAlias = Mapping[str, Any]
"""A message of a conversation, as chat templates take it: `role`, `content`, and what else the template reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an episode is about."""

    prompt: Prompt
    """The prompt of the data file: its `row`, and `answer` if the row has one."""
    messages: Sequence[Message]
    """The conversation that the row begins, with the system prompt of `data.system_prompt`."""
    seed: int
    """Different for each episode, and equal if the episode is repeated; of a failed attempt and the next, different."""
    shared: dict[str, Any]
    """One dict for all episodes of this rollout worker, in which an environment may leave what later ones use. It is
    not saved with the run, and other rollout workers have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows a reply of the policy."""

    messages: Sequence[Message] = ()
    """Messages that the policy answers next. Needs at least one unless the episode is done."""
    reward: float = 0.0
    """Reward of this turn; terms of type `environment` add up those of the episode."""
    done: bool = False
    """Whether the episode is over."""
    num_calls: int = 0
    """Number of tool calls that the step made, which `rollout.env.max_calls` limits."""
    reply: Message | None = None
    """How the conversation shows the policy's reply from now on. None: as the text that was sampled. A template that
    writes it differently from the sampled text makes the next turn a forked segment."""


class Environment(Protocol):
    """One episode of an environment: created, reset once, stepped, and closed; never used for a second episode.

    The methods may be async, or plain functions, which run in threads of their own. An exception, or a call that takes
    until the end of `rollout.env.max_seconds`, makes the episode a failed one: it is repeated once with another object,
    and then left out of the step as if it had not been sampled.
    """

    def reset(self, task: Task) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin the episode; return the messages that the policy answers first. None: those of the task."""
        ...

    def step(self, reply: str) -> Step | Awaitable[Step]:
        """Answer the policy's reply, without its special tokens."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds. Called once, also after a failure, unless the constructor failed."""
        ...
