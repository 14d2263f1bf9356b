from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.reward.python_function import is_async, load_reward_function

KEY = "reward.terms.mine.path"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary working directory; its modules are unloaded after the test."""
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_functions_from_the_working_directory(folder: Path) -> None:
    (folder / "my_rewards.py").write_text(
        "def f(trajectory, text, row): return 1.0\n"
        "async def g(trajectory, text, row, extra=0): return 2.0\n"
        "class H:\n    async def __call__(self, trajectory, text, row): return 3.0\n"
        "h = H()\n"
    )
    assert load_reward_function("my_rewards:f", key=KEY)(None, "", {}) == 1.0  # type: ignore[arg-type]
    assert [is_async(load_reward_function(f"my_rewards:{n}", key=KEY)) for n in "fgh"] == [False, True, True]


def test_working_directory_does_not_shadow_installed_modules(folder: Path) -> None:
    (folder / "colorsys.py").write_text("def rgb_to_hls(trajectory, text, row): return 99.0")
    (folder / "my_rewards.py").write_text("def f(trajectory, text, row): return 1.0")
    load_reward_function("my_rewards:f", key=KEY)  # puts the folder on the path
    sys.modules.pop("colorsys", None)
    assert load_reward_function("colorsys:rgb_to_hls", key=KEY)(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards", "needs package.module:function, got 'my_rewards'"),
        ("my_rewards:", "needs package.module:function"),
        (":f", "needs package.module:function"),
        ("nowhere.at_all:f", "cannot import nowhere.at_all: No module named 'nowhere'"),
        ("my_rewards:missing", "module my_rewards .* has no 'missing'"),
        ("my_rewards:number", r"needs a function, got my_rewards:number = 3"),
        ("my_rewards:two", r"needs a function of \(trajectory, text, row\), got my_rewards:two\(a, b\)"),
        ("my_rewards:four", r"got my_rewards:four\(a, b, c, d\): missing a required argument: 'd'"),
        ("broken:f", "importing broken raised NameError: name 'undefined' is not defined"),
        ("syntax:f", "importing syntax raised SyntaxError"),
        ("lacks:f", "cannot import lacks: No module named 'not_installed_here'"),
    ],
)
def test_errors_name_the_yaml_path(folder: Path, path: str, message: str) -> None:
    (folder / "my_rewards.py").write_text("number = 3\ndef two(a, b): ...\ndef four(a, b, c, d): ...\n")
    (folder / "broken.py").write_text("undefined")
    (folder / "syntax.py").write_text("def f(:")
    (folder / "lacks.py").write_text("import not_installed_here")
    with pytest.raises(ConfigError, match=rf"^{KEY}.*{message}"):
        load_reward_function(path, key=KEY)
