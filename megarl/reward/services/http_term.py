"""The reward term that asks a service of the user over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.batch.trajectory import Prompt
from megarl.config.reward_services import HttpRewardConfig
from megarl.reward.services.client import RefusedRequestError, ServiceClient, ServiceError
from megarl.reward.services.request_batcher import RequestBatcher
from megarl.reward.term_result import read_result
from megarl.reward.terms import Completion, TermError, TermValue, abbreviate, quote


class HttpTerm:
    """Sends completions in batches to a service, and checks what it answers."""

    compares_completions = False

    def __init__(self, name: str, config: HttpRewardConfig) -> None:
        """Create the term; raises as `ServiceClient`."""
        self._label = f"reward.terms.{name} (http, {config.url})"
        self._config = config
        self._client = ServiceClient(config, key=f"reward.terms.{name}")
        self._batcher: RequestBatcher[Mapping[str, Any], object] = RequestBatcher(
            self._send, max_size=config.max_batch_size, wait_seconds=config.batch_wait_seconds
        )

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return what the service answers; as `Term`."""
        return await asyncio.gather(*(self._score(completion, prompt) for completion in completions))

    async def _score(self, completion: Completion, prompt: Prompt) -> TermValue | TermError:
        item = {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "completion": completion.text,
            "finish_reason": completion.trajectory.finish_reason,
            "row": dict(prompt.row),
            "answer": prompt.answer,
        }
        where = quote(completion, prompt)
        result = await self._batcher.submit(item)
        if isinstance(result, ServiceError):
            failure = TermError(f"{self._label}: {result} {where}")
            failure.__cause__ = result
            return failure
        return read_result(self._label, result, where)

    async def _send(self, items: Sequence[Mapping[str, Any]]) -> Sequence[object | ServiceError]:
        """Return the service's result for each item, or the error. A batch that it refuses is split in two."""
        try:
            return self._read_answer(await self._client.post(self._config.url, {"completions": items}), len(items))
        except ServiceError as error:
            if not isinstance(error, RefusedRequestError) or len(items) == 1:
                return [error] * len(items)
        half = len(items) // 2
        first, second = await asyncio.gather(self._send(items[:half]), self._send(items[half:]))
        return [*first, *second]

    def _read_answer(self, answer: object, num: int) -> Sequence[object]:
        if not isinstance(answer, list):
            got = f"{type(answer).__name__} {abbreviate(answer)}"
            raise ServiceError(f"the service needs to answer with a list of {num} results, got {got}")
        if len(answer) != num:
            raise ServiceError(f"the service needs to answer with {num} results, one per completion, got {len(answer)}")
        return answer

    async def close(self) -> None:
        """Cancel requests in flight and close the connections."""
        await self._batcher.close()
        await self._client.close()
