"""The interface of an environment: messages in, messages and rewards out, one object per episode."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from megarl.batch.trajectory import Prompt
from megarl.config.data import DataConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.rows import Row
from megarl.rollout.agents.episode import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
import inspect
import weakref
from contextlib import suppress
from typing import cast

from megarl.config.rollout import EnvironmentConfig
from megarl.config.section import load_class
from megarl.errors import AgentError, ConfigError

Message: TypeAlias = Mapping[str, Any]
"""A message of a conversation, as chat templates take it: `role`, `content`, and what else the template reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an episode is about.

    Examples:
        >>> prompt = Prompt(prompt_id="train.jsonl:1", text="What is 6 * 7?", token_ids=(5, 6), row={}, answer="42")
        >>> Task(prompt=prompt, messages=[{"role": "user", "content": prompt.text}], seed=0, shared={}).prompt.answer
        '42'
    """

    prompt: Prompt
    """The prompt of the data file: its `row`, and `answer` if the row has one."""
    messages: Sequence[Message]
    """The conversation that the row begins, with the system prompt of `data.system_prompt`."""
    tools: Sequence[Message] = ()
    """Definitions of tools of the row, `data.fields.tools`, which the chat template writes into all prompts."""
    seed: int
    """Seed of the episode: the same if a step is repeated, another one after a failed attempt."""
    shared: dict[str, Any]
    """One dict for all episodes of this rollout worker, in which an environment may leave what later ones use. It is
    not saved with the run, and other rollout workers have their own."""


def require_answers(task: Task) -> tuple[str, ...]:
    """Return the reference answers of the task's row, at least one; each is right.

    Raises:
        ValueError: it has none.
    """
    if task.prompt.answer is None:
        raise ValueError(f"{task.prompt.prompt_id} has no answer (data.fields.answer)")
    return task.prompt.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows a reply of the policy.

    Examples:
        >>> Step(messages=[{"role": "tool", "content": "42"}], num_calls=1).done  # the policy replies to it
        False
        >>> Step(reward=1.0, done=True).messages
        ()
    """

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

    Examples:
            class Echo:
                def reset(self, task: environments.Task) -> None:
                    self._answer = task.prompt.answer

                def step(self, reply: str) -> environments.Step:
                    return environments.Step(reward=float(reply.strip() == self._answer), done=True)

                def close(self) -> None:
                    pass
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


class Tasks:
    """Makes the tasks of a rollout worker's episodes, which share a dict."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the templates of all sources; raises as `PromptTemplate`."""
        self._templates = {
            source.name: PromptTemplate(source.config, tokenizer, source.day, key=source.key)
            for source in data.resolved_sources
        }
        self._shared: dict[str, Any] = {}

    def of(self, episode: Episode) -> Task:
        """Return the task of an episode: its prompt, and the messages that the row begins."""
        prompt = episode.prompt
        name, _, line = prompt.prompt_id.rpartition(":")
        template, row = self._templates[prompt.source], Row(Path(name), int(line), prompt.row)
        messages, tools = template.question(row), template.tools(row)
        return Task(prompt=prompt, messages=messages, tools=tools, seed=episode.seed, shared=self._shared)


ENV = "rollout.env"
"""YAML key of the environment of all sources that have none of their own."""

METHODS = {"reset": 1, "step": 1, "close": 0}
"""Methods of an environment, and the number of their arguments."""

CHECK = "check_settings"
"""Optional static method of an environment that takes its keyword arguments before a run begins, and raises a
`ConfigError` if no episode could start with them."""


def check_environment(config: EnvironmentConfig, key: str = ENV) -> type:
    """Import the class of the environment and return it after checking its methods; no object is created.

    Args:
        key: YAML key of the section.

    Raises:
        ConfigError: it cannot be imported, is no class, lacks a method, or does not take the keyword arguments, or its
            `check_settings` refuses them.
    """
    found = load_class(config.path, key=f"{key}.path")
    for name, num_arguments in METHODS.items():
        method = getattr(found, name, None)
        if not callable(method):
            raise ConfigError(
                f"{key}.path needs a class with the methods {', '.join(METHODS)}, {config.path} has no {name}"
            )
        try:
            inspect.signature(method).bind(*[None] * (num_arguments + 1))
        except TypeError as e:
            raise ConfigError(
                f"{key}.path: {config.path}.{name}{inspect.signature(method)} needs to take {num_arguments} arguments: "
                f"{e}"
            ) from e
    try:
        inspect.signature(found).bind(**config.kwargs)
    except TypeError as e:
        raise ConfigError(
            f"{key}.kwargs: {config.path}{inspect.signature(found)} does not take these arguments: {e}"
        ) from e
    if isinstance(inspect.getattr_static(found, CHECK, None), staticmethod):
        getattr(found, CHECK)(**config.kwargs)
    return found


class EnvironmentFactory:
    """Creates an environment for each episode."""

    def __init__(self, config: EnvironmentConfig, key: str = ENV) -> None:
        """Import the class; arguments and errors as for `check_environment`."""
        self._config, self._key, self._class = config, key, check_environment(config, key)
        self._used: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def create(self) -> Environment:
        """Return a new object.

        Raises:
            AgentError: it is that of another episode.
        """
        found = self._class(**self._config.kwargs)
        if self._used.get(id(found)) is found:
            raise AgentError(
                f"{self._key}.path needs a new object for each episode, {self._config.path} returned that of another "
                "episode"
            )
        with suppress(TypeError):  # a class with slots that has no weak references cannot be checked
            self._used[id(found)] = found
        return cast("Environment", found)
