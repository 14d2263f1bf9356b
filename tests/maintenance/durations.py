"""Plugin of pytest that writes the CPU and wall seconds of every test to a file.

    python -m pytest -p tests.maintenance.durations --durations-to=FILE

The CPU seconds of a test are those that its pytest process and all processes below it have used from the end of the
test before it to its own end: set-up of shared fixtures counts for the first test that needs them. Processes that have
left the tree (daemons) are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

HEADER = "CPU seconds\twall seconds\ttest"


class Recorder:
    """Appends a line per test to a file; the process that distributes the tests sorts them at the end."""

    def __init__(self, file: Path, *, is_main: bool) -> None:
        self.file, self.is_main = file, is_main
        file.parent.mkdir(parents=True, exist_ok=True)
        self.cpu, self.wall = tree_cpu_seconds(), time.monotonic()
        if is_main:
            file.unlink(missing_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record one test, its set-up and tear-down included."""
        self.wall = time.monotonic()
        result = yield
        cpu = tree_cpu_seconds()
        line = f"{max(cpu - self.cpu, 0):.2f}\t{time.monotonic() - self.wall:.2f}\t{item.nodeid}\n"
        with self.file.open("a") as f:  # one write, so that lines of several processes do not mix
            f.write(line)
        self.cpu = cpu
        return result

    def pytest_sessionfinish(self) -> None:
        """Sort the file by CPU seconds."""
        if self.is_main and self.file.exists():
            rows = [line.split("\t") for line in self.file.read_text().splitlines()]
            rows.sort(key=lambda row: -float(row[0]))
            lines = ["\t".join(row) for row in rows]
            self.file.write_text("\n".join([HEADER, *lines, ""]))


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process, of all processes below it, and of those below that have ended."""
    seconds = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            seconds += sum(process.cpu_times()[:4])  # user, system, and the same of children that were waited for
        except psutil.NoSuchProcess:
            continue  # its parent counts it from now on
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--durations-to", type=Path, metavar="FILE", help="write wall and CPU seconds of every test")


def pytest_configure(config: pytest.Config) -> None:
    """Record if the option is given."""
    file: Path | None = config.getoption("--durations-to")
    if file is not None:
        config.pluginmanager.register(Recorder(file.absolute(), is_main=not hasattr(config, "workerinput")))
