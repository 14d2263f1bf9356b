"""The task of an episode, from the row of its prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.data import DataConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.rows import Row
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.environment import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        messages = self._templates[prompt.source].conversation(Row(Path(name), int(line), prompt.row))
        return Task(prompt=prompt, messages=messages, seed=episode.seed, shared=self._shared)
