from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.reward import PythonRewardConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.python_function import PythonReward, load_reward

KEY = "reward.terms.mine"


def load(path: str, **fields: Any) -> PythonReward:
    return load_reward(PythonRewardConfig(type="python", path=path, **fields), key=KEY)


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
    assert load("my_rewards:f").function(None, "", {}) == 1.0
    assert [load(f"my_rewards:{n}").is_async for n in "fgh"] == [False, True, True]


CLASS = """
class Judge:
    created = 0
    def __init__(self, url, *, retries=3):
        Judge.created += 1
        self.url, self.retries, self.is_closed = url, retries, False
    async def score(self, trajectory, text, row):
        return self.retries
    def close(self):
        self.is_closed = True
class Group:
    @staticmethod
    def score(trajectories, texts, row):
        return [0.0] * len(texts)
class Broken:
    def __init__(self):
        raise OSError("no such host")
    def score(self, trajectory, text, row): ...
class NoScore: ...
class ShortScore:
    def score(self, text): ...
def with_options(trajectory, text, row, *, low, high=1.0): return (low, high)
def with_any(trajectory, text, row, **options): return options
"""


def test_kwargs_are_passed_to_functions_and_classes(folder: Path) -> None:
    (folder / "my_rewards.py").write_text(CLASS)
    assert load("my_rewards:with_options", kwargs={"low": 0.2}).function(None, "", {}) == (0.2, 1.0)
    assert load("my_rewards:with_any", kwargs={"a": [1]}).function(None, "", {}) == {"a": [1]}
    judge = load("my_rewards:Judge", kwargs={"url": "http://localhost"})
    assert judge.is_async
    instance = judge.function.__self__  # type: ignore[attr-defined]
    assert (instance.url, instance.retries, type(instance).created) == ("http://localhost", 3, 1)
    assert judge.close is not None
    judge.close()
    assert instance.is_closed
    group = load("my_rewards:Group", per="group")
    assert (group.is_async, group.close, group.function([], ["a", "b"], {})) == (False, None, [0.0, 0.0])
    message = rf"^{KEY} \(my_rewards:Broken\) cannot be created: OSError: no such host \(at .*my_rewards.py:\d+\)$"
    with pytest.raises(RewardError, match=message):
        load("my_rewards:Broken")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("with_options", {}, ".kwargs: my_rewards:with_options needs a value for 'low', which has no default"),
        (
            "with_options",
            {"kwargs": {"low": 1, "hihg": 2}},
            ".kwargs: my_rewards:with_options has no option 'hihg', it",
        ),
        ("Group", {"kwargs": {"a": 1}}, ".kwargs: my_rewards:Group has no option 'a', it has none"),
        ("Judge", {}, ".kwargs: my_rewards:Judge needs a value for 'url', which has no default"),
        ("NoScore", {}, ".path needs a class with a method score(trajectory, text, row), my_rewards:NoScore has none"),
        ("ShortScore", {"per": "group"}, ".path needs a function of (self, trajectories, texts, row), got my_rewards:"),
    ],
)
def test_signatures_are_checked(folder: Path, name: str, fields: dict[str, Any], message: str) -> None:
    (folder / "my_rewards.py").write_text(CLASS)
    with pytest.raises(ConfigError, match="^" + re.escape(KEY + message)):
        load(f"my_rewards:{name}", **fields)


def test_working_directory_does_not_shadow_installed_modules(folder: Path) -> None:
    (folder / "colorsys.py").write_text("def rgb_to_hls(trajectory, text, row): return 99.0")
    (folder / "my_rewards.py").write_text("def f(trajectory, text, row): return 1.0")
    load("my_rewards:f")  # puts the folder on the path
    sys.modules.pop("colorsys", None)
    assert load("colorsys:rgb_to_hls").function(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards", "needs package.module:function, got 'my_rewards'"),
        ("my_rewards:", "needs package.module:function"),
        (":f", "needs package.module:function"),
        ("nowhere.at_all:f", "cannot import nowhere.at_all: No module named 'nowhere'"),
        ("my_rewards:missing", "module my_rewards .* has no 'missing'"),
        ("my_rewards:number", r"needs a function or a class, got my_rewards:number = 3"),
        ("my_rewards:two", r"needs a function of \(trajectory, text, row\), got my_rewards:two\(a, b\)"),
        ("my_rewards:four", "my_rewards:four needs a value for 'd', which has no default"),
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
        load(path)
