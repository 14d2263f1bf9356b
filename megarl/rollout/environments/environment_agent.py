"""The agent that lets the policy talk with an environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.batch.trajectory import MAX_REWARD, TIME_LIMIT, Trajectory
from megarl.config.data import DataConfig
from megarl.config.rollout import EnvironmentConfig
from megarl.engines.engine_pool import EngineFailedError
from megarl.errors import AgentError
from megarl.rollout.agents.episode import Episode, RefusedTextError
from megarl.rollout.environments.conversation import (
    ChatRenderer,
    EnvironmentFailedError,
    bounded,
    call_environment,
    make_renderers,
    with_text,
)
from megarl.rollout.environments.environment import ENV, Environment, EnvironmentFactory, Message, Step, Task, Tasks
from megarl.text import describe_error, text_of
from megarl.user_code import outcome_of, read_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSE_SECONDS = 5.0
"""How long `close` may take at least, also in an episode whose time is over."""


REFUSED = "refused"
"""How an episode ends whose conversation the chat template cannot write because of a text in it."""


class EnvironmentAgent:
    """Runs episodes of an environment; an agent, as `rollout.agent` names one.

    Before each sampling it checks the limits in this order: turns, seconds, calls, tokens. The first one that is
    reached is the episode's `finish_reason`: `turns`, `seconds`, `calls` or `length`. Where the chat template refuses
    the text of a message, or rewrites a reply although `forks` forbids it and others would stay, the episode ends with
    `refused` and the rewards that it has so far.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        refuses_forks: str | None = None,
        key: str = ENV,
    ) -> None:
        """Import the environment and probe the chat template.

        Args:
            refuses_forks: why the algorithm cannot train on forked segments; None: it can.
            key: YAML key of `config`, for error messages.

        Raises:
            ConfigError: as `check_environment`.
            DataError: as `require_chat_template`.
        """
        self._renderers = make_renderers(data, tokenizer, config, refuses_forks=refuses_forks, key=key)
        self._config, self._key, self._factory = config, key, EnvironmentFactory(config, key)
        self._tasks = Tasks(data, tokenizer)

    async def __call__(self, episode: Episode) -> list[Trajectory]:
        """Run one episode and return its trajectories.

        Raises:
            EnvironmentFailedError: the environment raised an exception or took too long.
            AgentError: the environment returned something else than its interface allows.
            EngineFailedError: as `Episode.generate`.
        """
        episode.end_by_itself()
        run = _Run(self._config, self._key, self._renderers[episode.prompt.source], episode)
        environment, error = outcome_of(self._factory.create)
        if isinstance(error, AgentError):
            raise error
        if error is not None:
            raise EnvironmentFailedError(f"{run.label} cannot be created: {describe_error(error)}") from error
        try:
            await run.play(environment, self._tasks.of(episode))
        except BaseException:
            with suppress(EnvironmentFailedError):  # the first error counts
                await run.close(environment)
            raise
        await run.close(environment)
        return episode.trajectories()


@dataclass
class _Run:
    """One episode with its environment."""

    config: EnvironmentConfig
    key: str
    renderer: ChatRenderer
    episode: Episode
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Message] = ()
    num_turns: int = 0
    num_calls: int = 0
    began_at: float = 0.0

    def __post_init__(self) -> None:
        self.began_at = self.episode.clock.time()

    @property
    def label(self) -> str:
        return f"{self.key}.path ({self.config.path})"

    @property
    def seconds_left(self) -> float:
        return self.config.max_seconds - (self.episode.clock.time() - self.began_at)

    async def play(self, environment: Environment, task: Task) -> None:
        """Let policy and environment talk until the episode ends."""
        self.tools = task.tools
        first = await self._call(environment.reset, task, name="reset")
        if first is not None:
            self._require_messages(first, "reset")
        self.messages = (
            [*task.messages] if first is None else [bounded(m, self.config.max_message_bytes) for m in first]
        )
        self._require_unanswered(self.messages, "reset")
        if first is not None:
            try:
                token_ids = self.renderer.prompt(self.messages, self.tools)
            except RefusedTextError:
                self.episode.finish_reason = REFUSED
                return
            if len(token_ids) >= self.episode.max_num_tokens:
                self.episode.finish_reason = "length"
                return
            self.episode.fork(token_ids)
        while (limit := self._limit()) is None:
            generation = await self.episode.generate(max_new_tokens=self.config.max_turn_tokens)
            self.num_turns += 1
            if generation.finish_reason == TIME_LIMIT:
                limit = TIME_LIMIT
                break
            if generation.finish_reason != "stop" and self.episode.num_remaining_tokens <= 0:
                limit = "length"
                break
            if not len(generation.token_ids):
                raise EngineFailedError("the engine sampled no token")
            reply = self.episode.decode(generation.token_ids)
            if self.seconds_left <= 0:
                limit = TIME_LIMIT
                break
            step = await self._call(environment.step, reply, name="step")
            self.episode.add_turn_reward(self._checked_reward(step))
            self.num_calls += step.num_calls
            if step.done:
                limit = "stop"
                break
            limit = self._continue(step, reply, int(generation.token_ids[-1]))
            if limit is not None:
                break
        self.episode.finish_reason = limit

    async def close(self, environment: Environment) -> None:
        """Close the environment; its time limit is what is left of the episode's, at least `CLOSE_SECONDS`."""
        await self._call(environment.close, name="close", seconds=max(CLOSE_SECONDS, self.seconds_left))

    def _limit(self) -> str | None:
        """Return the first limit that is reached."""
        config = self.config
        if self.num_turns >= config.max_turns:
            return "turns"
        if self.seconds_left <= 0:
            return TIME_LIMIT
        if config.max_calls is not None and self.num_calls >= config.max_calls:
            return "calls"
        return "length" if self.episode.num_remaining_tokens <= 0 else None

    def _continue(self, step: Step, reply: str, last_token: int) -> str | None:
        """Append the messages of the step to the tokens; return how the episode ends if that cannot be."""
        following = [bounded(message, self.config.max_message_bytes) for message in step.messages]
        before, shown = [*self.messages], with_text(step.reply) if step.reply else None
        self._require_unanswered(following, "step")
        try:
            found = self.renderer.extension(before, reply, following, last_token, shown, self.tools)
        except RefusedTextError:
            return REFUSED
        self.messages += [shown or {"role": "assistant", "content": reply}, *following]
        if not found.is_fork:
            if len(found.token_ids) >= self.episode.num_remaining_tokens:
                return "length"
            self.episode.observe(found.token_ids)
            return None
        if self.config.forks == "forbid":
            if step.reply is None and not self.renderer.rewrites_plain_texts(before, following):
                return REFUSED
            raise AgentError(
                f"{self.label}: the chat template rewrites the reply {_quote(reply)} of an earlier turn, which "
                f"{self.key}.forks: forbid does not allow"
            )
        if len(found.token_ids) >= self.episode.max_num_tokens:
            return "length"
        self.episode.fork(found.token_ids)
        return None

    async def _call(self, function: Any, *arguments: object, name: str, seconds: float | None = None) -> Any:
        return await call_environment(
            function,
            *arguments,
            label=f"{self.label}.{name}",
            seconds=self.seconds_left if seconds is None else seconds,
            clock=self.episode.clock,
        )

    def _checked_reward(self, step: object) -> float:
        """Return the reward of a step; raises unless the step is what the interface allows."""
        if not isinstance(step, Step):
            raise AgentError(f"{self.label}.step needs to return a Step, got {type(step).__name__}")
        self._require_messages(step.messages, "step")
        if not step.done and not step.messages:
            raise AgentError(f"{self.label}.step needs to return messages, or done: got a Step with neither")
        reward = read_number(step.reward)
        if reward is None or not abs(reward) <= MAX_REWARD:
            got = _quote(step.reward)
            raise EnvironmentFailedError(f"{self.label}.step needs to return a finite reward up to 1e18, got {got}")
        return reward

    def _require_messages(self, messages: object, name: str) -> None:
        if not isinstance(messages, Sequence) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise AgentError(f"{self.label}.{name} needs messages {{role, content}}, got {_quote(messages)}")

    def _require_unanswered(self, messages: Sequence[Message], name: str) -> None:
        if messages and messages[-1]["role"] == "assistant":
            raise AgentError(
                f"{self.label}.{name} needs messages of which the policy answers the last, got one of the assistant at "
                "the end"
            )


def _quote(value: object) -> str:
    return re.sub(r"^(.{120}).+$", r"\1 ...", text_of(value), flags=re.S)
