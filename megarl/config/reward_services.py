"""Reward terms that a service computes: of one's own over HTTP, or a judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.config.reward_term import RuleConfig
from megarl.config.section import Section

SERVICE_SETTINGS = frozenset(
    {
        "url",
        "api_key_env",
        "timeout_seconds",
        "max_retries",
        "backoff_seconds",
        "max_concurrent_requests",
        "breaker",
        "max_batch_size",
        "batch_wait_seconds",
    }
)
"""Fields that say where and how a service is called, and not what it returns: they may change on resume."""


class BreakerConfig(Section):
    """When requests to a service are held back: while it is down, only one request at a time is sent to try it."""

    failures: int = Field(default=5, ge=1)
    """Number of consecutive failed requests of a rollout worker after which it holds back further ones."""

    cooldown_seconds: float = Field(default=10.0, gt=0)
    """Time until one request tries the service again; the others wait for its result."""


class ServiceRewardConfig(RuleConfig):
    """Fields of a reward term that calls a service. Limits and counts are those of one rollout worker."""

    url: str
    """Address of the service, beginning with http:// or https://."""

    api_key_env: str | None = None
    """Name of an environment variable of the rollout workers, whose value is sent as `Authorization: Bearer VALUE`.
    Default: no such header."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """Timeout in seconds of one request."""

    max_retries: int = Field(default=4, ge=0)
    """Number of times that a request is sent again after a timeout, a lost connection, or a status 408, 429 or 5xx.
    Then the term has failed on the completion."""

    backoff_seconds: float = Field(default=0.5, gt=0)
    """Mean time before the first retry. It doubles with each retry, up to 30 seconds, and is random between 0 and
    twice its mean, so that workers do not retry all at once. A longer `Retry-After` of the service is obeyed."""

    max_concurrent_requests: int = Field(default=16, ge=1)
    """Number of requests that are in flight at once."""

    breaker: BreakerConfig = BreakerConfig()

    @model_validator(mode="after")
    def _check_url(self) -> ServiceRewardConfig:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url needs to begin with http:// or https://, got {self.url!r}")
        return self


class HttpRewardConfig(ServiceRewardConfig):
    """Reward from a service of one's own, which scores batches of completions of all groups.

    A request is a POST of `{"completions": [{"prompt_id", "prompt", "completion", "finish_reason", "row", "answer"},
    ...]}`; the answer is a list with one number per completion, or a mapping `{"reward": NUMBER, ...}` whose other
    entries are logged as `reward/<term>/<key>`.
    """

    type: Literal["http"]

    max_batch_size: int = Field(default=64, ge=1)
    """Largest number of completions in one request."""

    batch_wait_seconds: float = Field(default=0.02, ge=0)
    """Time that a completion waits for others to be sent in the same request."""


class JudgeRewardConfig(ServiceRewardConfig):
    """Score that a language model gives a completion, asked through an OpenAI-compatible chat endpoint.

    `url` is the address before `/chat/completions`, such as `http://judge:8000/v1`.
    """

    type: Literal["judge"]

    model: str
    """Name of the model, as the endpoint knows it."""

    rubric: str
    """The message to the judge, with `{prompt}`, `{completion}` and, if rows have one, the reference `{answer}`."""

    system: str | None = None
    """System message before the rubric. Default: none."""

    pattern: str = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score in the judge's reply. Its first group is the number; the last match
    counts. Default: the number after the last word "score"."""

    min_score: float = 0.0
    """Score that gives reward 0. A reply with a score below it is a failure."""

    max_score: float = 10.0
    """Score that gives reward 1. A reply with a score above it is a failure."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""

    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens of the judge's reply."""

    extra_body: dict[str, Any] = Field(default={})
    """Further fields of the request, such as `seed` or `response_format`."""

    @model_validator(mode="after")
    def _check_scores(self) -> JudgeRewardConfig:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score needs to be below max_score, got {self.min_score:g} >= {self.max_score:g}")
        if "{completion}" not in self.rubric:
            raise ValueError("rubric needs to contain {completion}, which the text of the completion replaces")
        return self
