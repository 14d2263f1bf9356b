"""Clocks that run ahead: time limits of hours fire at once, but only when a test says so.

python -m tests.cluster.launch.skewed_clock FILE ARGUMENTS...  `megarl ARGUMENTS...`, its clocks jump once FILE exists
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from megarl.cluster.launch import connection, rendezvous
from tests.time_limits import UNREACHED_SECONDS


def skew_clocks(offset: Callable[[], float]) -> None:
    """Make the clocks of event loops and of the rendezvous run `offset()` seconds ahead of the machine's."""
    asyncio.BaseEventLoop.time = lambda _: time.monotonic() + offset()  # type: ignore[method-assign]
    rendezvous.time = SimpleNamespace(monotonic=lambda: time.monotonic() + offset())  # type: ignore[assignment]


def skew_clocks_once_exists(file: Path) -> None:
    """Make the clocks of this process jump by `UNREACHED_SECONDS` when the file appears."""
    connection.MAX_HEARTBEAT_INTERVAL_SECONDS = 0.5  # the loops wake often, and notice that it is there
    skew_clocks(lambda: UNREACHED_SECONDS if file.exists() else 0.0)


if __name__ == "__main__":
    from megarl.cli.main import main

    skew_clocks_once_exists(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
