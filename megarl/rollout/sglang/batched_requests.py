"""Sends the requests that reach an engine together to its schedulers in one message.

SGLang sends a message for each request. A scheduler that waits wakes up at the first one, so it computes a batch of a
few prompts while the host still sends the others, and further small batches after it:

one by one    host       | 1 | 2 | 3 | ... | 128 |
              scheduler      | 1 | 2 to 9 | 10 to 40 | ...
together      host       | 1 to 128 |
              scheduler             | 1 to 128 |
"""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def make_tokenizer_manager_class() -> type[TokenizerManager]:
    """Return a subclass of SGLang's tokenizer manager that sends the requests of one event-loop iteration together."""
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class BatchingTokenizerManager(TokenizerManager):  # type: ignore[misc]
        """Its schedulers get all messages in the order in which they were sent."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            self._unsent: list[TokenizedGenerateReqInput] = []
            super().__init__(*args, **kwargs)

        def _dispatch_to_scheduler(self, obj: Any) -> None:
            if not isinstance(obj, TokenizedGenerateReqInput):
                self._send_requests()
                super()._dispatch_to_scheduler(obj)
                return
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_requests)
            self._unsent.append(copy.copy(obj))  # the caller decodes a field again that it has encoded to send it

        async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
            self._send_requests()
            await super()._async_dispatch_to_scheduler(obj)

        def _send_requests(self) -> None:
            requests, self._unsent = self._unsent, []
            if requests:
                single = len(requests) == 1
                super()._dispatch_to_scheduler(
                    requests[0] if single else BatchTokenizedGenerateReqInput(batch=requests)
                )

    return BatchingTokenizerManager
