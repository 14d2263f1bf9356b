"""The scopes of `tests/distribution.py` cover the tests that share a fixture."""

from __future__ import annotations

import pytest

from tests.distribution import SHARED_FIXTURES, position, scope


def uses(item: pytest.Item, fixture: str) -> bool:
    """Return whether the test uses the session's fixture, and not a parameter or a fixture of its file of that name."""
    assert isinstance(item, pytest.Function)
    replaced = fixture in vars(item.module) or fixture in getattr(getattr(item, "callspec", None), "params", {})
    return fixture in item.fixturenames and not replaced


def test_tests_that_share_a_fixture_have_its_scope(request: pytest.FixtureRequest) -> None:
    shared = [(item.nodeid, name) for item in request.session.items for name in SHARED_FIXTURES if uses(item, name)]
    assert [(nodeid, name) for nodeid, name in shared if scope(nodeid) != name] == []


def test_scopes() -> None:
    assert scope("tests/cluster/workers/test_group.py::test_a") == "cluster"
    assert scope("tests/reward/test_answers.py::test_a[x]") == "tests/reward/test_answers.py"
    assert scope("tests/end_to_end/test_exit_codes.py::test_a[x]") == "tests/end_to_end/test_exit_codes.py::test_a[x]"
    files = (
        "end_to_end/test_train.py",
        "cluster/workers/test_group.py",
        "end_to_end/test_exit_codes.py",
        "reward/test_answers.py",
    )
    positions = [position(f"tests/{file}::test_a") for file in files]
    assert positions == sorted(set(positions))
