"""The section `rollout.harness`: programs that run episodes through an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.config.section import Section


class HarnessConfig(Section):
    """A program that runs an episode through an OpenAI-compatible endpoint, in training and evaluation."""

    command: list[str] | None = None
    """Program and arguments. It gets the task as JSON on stdin, and the endpoint in the environment variables
    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, for Anthropic's SDK also in `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`. Either this or `path`."""

    path: str | None = None
    """Import path, `package.module:name`, of an async function `run(task, base_url, api_key, **kwargs)` that runs in
    the rollout worker. Either this or `command`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; for a command, `kwargs` of its task."""

    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command."""

    include_answer: bool = False
    """Give the command the field `data.fields.answer` of the row too. A tool that runs what the policy writes could
    read it there."""

    max_turns: int = Field(default=16, ge=1)
    """Number of replies after which an episode ends with `finish_reason: turns`."""

    max_seconds: float = Field(default=120.0, gt=0)
    """Duration after which an episode ends before its next turn, with `finish_reason: seconds`; pauses of the engines
    do not count. A program that neither ends nor asks for another turn by then has failed."""

    max_calls: int | None = Field(default=None, ge=1)
    """Number of tool calls, as `tool_parser` finds them, after which an episode ends with `finish_reason: calls`.
    Default: no limit."""

    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one reply. Default: what is left of `rollout.max_new_tokens`, so that turns which a
    program requests in parallel wait for one another."""

    max_programs: int = Field(default=32, ge=1)
    """Largest number of episodes that a rollout worker runs at the same time; others wait."""

    tool_parser: str | None = None
    """Name of SGLang's parser for tool calls, as `--tool-call-parser` has it. Default: none, and requests with tools
    are refused."""

    reasoning_parser: str | None = None
    """Name of SGLang's parser for thoughts, as `--reasoning-parser` has it. Default: none, thoughts are part of the
    reply."""

    forks: Literal["forbid", "allow"] = "allow"
    """What to do if a request does not continue the tokens before, because the program has rewritten its history or the
    chat template rewrites earlier turns. `allow`: it becomes another segment of the episode. `forbid`: it is
    refused."""

    host: str = "127.0.0.1"
    """Address that the endpoint listens at. Programs on other hosts need one that they can reach."""

    @field_validator("command")
    @classmethod
    def _expand_home(cls, command: list[str] | None) -> list[str] | None:
        return None if command is None else [os.path.expanduser(word) for word in command]

    @model_validator(mode="after")
    def _check_program(self) -> HarnessConfig:
        if (self.command is None) == (self.path is None):
            got = "neither" if self.command is None else "both"
            raise ValueError(f"command and path: one of them names the program, got {got}")
        if self.command is not None and not self.command:
            raise ValueError("command needs a program, got an empty list")
        if self.path is not None and (self.env or self.include_answer):
            name = "env" if self.env else "include_answer"
            raise ValueError(f"{name} belongs to a command, got it with path = {self.path}; remove it")
        return self

    @property
    def label(self) -> str:
        """The program, for messages."""
        return " ".join(self.command or [self.path or ""])
