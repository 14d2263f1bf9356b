"""A call on the items of several callers, each of which waits for the result of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence


async def call_for_all[T, R](
    call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], batch: Sequence[tuple[T, asyncio.Future[R]]]
) -> None:
    """Call once for all items, and set the future of each to its result; an error of the call is set in all of them.

    Futures that are done, such as those of callers that were canceled, stay as they are.

    Args:
        call: returns one result per item, in order.
    """
    try:
        values = await call([item for item, _ in batch])
        assert len(values) == len(batch), f"{len(values)} results for {len(batch)} items"
    except Exception as error:  # noqa: BLE001 -- raised again in each of the callers
        for _, result in batch:
            if not result.done():
                result.set_exception(error)
        return
    for (_, result), value in zip(batch, values, strict=True):
        if not result.done():
            result.set_result(value)
