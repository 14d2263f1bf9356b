"""Tables that tests of GPUs print at the end of the session."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron.conftest import model_folder  # noqa: F401 -- a fixture

TABLES = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def report(request) -> Callable[[str, str], None]:
    """Function that adds lines to the table with this title."""
    tables = request.config.stash.setdefault(TABLES, {})

    def add(title: str, lines: str) -> None:
        tables.setdefault(title, []).append(lines)

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for title, lines in config.stash.get(TABLES, {}).items():
        terminalreporter.section(title)
        terminalreporter.write_line("\n".join(lines))
