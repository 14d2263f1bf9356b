"""The reward term that asks a language model behind an OpenAI-compatible chat endpoint for a score."""

from __future__ import annotations

import re
from typing import override

from megarl.batch.trajectory import Prompt
from megarl.config.reward import JudgeRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.services.client import ServiceClient, ServiceError
from megarl.reward.terms import Completion, CompletionTerm, TermError, TermValue, abbreviate, compile_pattern, quote

SEARCH_SECONDS = 1.0
"""CPU time of the search for the score in a reply."""

_FIELDS = re.compile(r"\{(prompt|completion|answer)\}")


class JudgeTerm(CompletionTerm):
    """Asks a judge for the score of each completion, in a request of its own.

    The value is scaled to 0 to 1; the score itself is the further value `score`.
    """

    def __init__(self, name: str, config: JudgeRewardConfig) -> None:
        """Create the term.

        Raises:
            ConfigError: the pattern is no regular expression with a group, or as `ServiceClient` raises it.
        """
        self._label = f"reward.terms.{name} (judge, {config.url})"
        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        check_judge_pattern(config, key=f"reward.terms.{name}")
        self._pattern = compile_pattern(config.pattern, key=f"reward.terms.{name}.pattern")
        self._client = ServiceClient(config, key=f"reward.terms.{name}")

    @override
    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        if prompt.answer is None and "{answer}" in self._config.rubric:
            raise RewardError(
                f"{self._label} needs a reference answer for its rubric (data.fields.answer), but {prompt.prompt_id} "
                "has none"
            )
        config = self._config
        try:
            score = self._read_score(_read_reply(await self._client.post(self._url, self._body(completion, prompt))))
        except ServiceError as error:
            failure = TermError(f"{self._label}: {error} {quote(completion, prompt)}")
            failure.__cause__ = error
            return failure
        reward = (score - config.min_score) / (config.max_score - config.min_score)
        return TermValue(reward, {"score": score})

    def _body(self, completion: Completion, prompt: Prompt) -> dict[str, object]:
        config = self._config
        values = {"prompt": prompt.text, "completion": completion.text, "answer": " or ".join(prompt.answers)}
        # in one pass, so that a completion which contains {answer} does not get it
        rubric = _FIELDS.sub(lambda match: values[match[1]], config.rubric)
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        return {
            "model": config.model,
            "messages": [*system, {"role": "user", "content": rubric}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }

    def _read_score(self, reply: str) -> float:
        """Return the number in the first group of the last match.

        Raises:
            ServiceError: there is none, or it is outside the scale.
        """
        config, score = self._config, None
        try:
            for match in self._pattern.finditer(reply, timeout=SEARCH_SECONDS):
                score = match[1]
        except TimeoutError as error:
            raise ServiceError(f"the search for the score took longer than {SEARCH_SECONDS:g} s") from error
        if score is None:
            raise ServiceError(f"the judge's reply has no match of the pattern {config.pattern!r}: {abbreviate(reply)}")
        try:
            value = float(score)
        except ValueError as error:
            raise ServiceError(f"the judge's score needs to be a number, got {abbreviate(score)}") from error
        if not config.min_score <= value <= config.max_score:
            raise ServiceError(
                f"the judge's score needs to be between {config.min_score:g} and {config.max_score:g}, got {value:g}"
            )
        return value

    @override
    async def close(self) -> None:
        """Close the connections to the judge."""
        await self._client.close()


def check_judge_pattern(config: JudgeRewardConfig, *, key: str) -> None:
    """Check the pattern of a judge.

    Args:
        key: YAML path of the term, for error messages.

    Raises:
        ConfigError: it is no regular expression, or has no group.
    """
    if not compile_pattern(config.pattern, key=f"{key}.pattern").groups:
        raise ConfigError(
            f"{key}.pattern: needs a group around the score, as in 'score: (\\d+)', got {config.pattern!r}"
        )


def _read_reply(answer: object) -> str:
    """Return the text of the first choice.

    Raises:
        ServiceError: the answer has none.
    """
    try:
        text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
    except (LookupError, TypeError) as error:
        raise ServiceError(f"the answer needs choices[0].message.content, got {abbreviate(answer)}") from error
    if not isinstance(text, str):
        raise ServiceError(f"the judge's reply needs to be text, got {abbreviate(text)}")
    return text
