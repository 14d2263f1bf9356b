"""Time limits that tests share, generous since the machine may be slow and busy, and waiting within them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

HANG_SECONDS = 600.0
"""Time after which a test takes a process, thread or call for hung.

Where a test shows that something does not wait for a time limit, that limit is longer than this.
"""

UNREACHED_SECONDS = 2 * HANG_SECONDS
"""A time limit of the product that is not reached, however slow the machine is."""

END_SECONDS = 40.0
"""Time in which all processes of a run end after the command that started it.

Shorter than the 60 s for which some of Ray's processes outlive a cluster that was killed.
"""


def wait_until(condition: Callable[[], Any], seconds: float = HANG_SECONDS) -> bool:
    """Poll until the condition is true, at first every few milliseconds; return False on timeout."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


async def wait_for(condition: Callable[[], Any]) -> None:
    """Poll until the condition is true, while other tasks run; raise TimeoutError after `HANG_SECONDS`."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
