"""`make measures` finds what each of its measures is for, in a tree of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.maintenance import tree_measures

BAD_MODULE = '''"""Two words."""

def long():
    """Return a number, after many lines."""
{lines}
    try:
        return 1
    except (ValueError, Exception):
        return 2
'''

REACHING_TEST = """from megarl import parts
from megarl.parts import _shared

def test(part, patch):
    assert part._size == _shared
    part.other._grow()
    patch.setattr(parts, "_shared", 2)
    patch.setattr("megarl.parts._shared", 3)

class Mine:
    def __init__(self):
        self._size = os._exit
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a tree with one place for each measure; return its files."""
    files = {f"megarl/run/m{i}.py": "" for i in range(16)}
    files |= {"megarl/a/same.py": "", "megarl/b/same.py": "", "-q/rows.jsonl": "{}", "docs/page.md": "It goes on.\n"}
    files["megarl/parts.py"] = "_shared = 1\n\nclass Part:\n    def _grow(self):\n        self._size = 1\n"
    files["tests/test_parts.py"] = REACHING_TEST
    files["megarl/bad.py"] = BAD_MODULE.format(lines="    x = 1\n" * 80)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tree_measures, "ROOT", tmp_path)
    return sorted(files)


def test_each_measure_finds_its_places(tree: list[str]) -> None:
    assert tree_measures.measure(tree) == {
        "packages with too many files": ["megarl/run: 16 files, at most 15"],
        "base names that occur more than once": ["same.py: 2 files"],
        "docstrings of at most three words": ["megarl/bad.py:1: Two words."],
        "broad excepts": ["megarl/bad.py:88: except of any exception"],
        "words to avoid": ["docs/page.md:1: goes on"],
        "functions of more than 80 lines": ["megarl/bad.py:3: long: 87 lines"],
        "unexpected names": ["-q: not among the names of the root", "-q/rows.jsonl: begins with -"],
        "reaches into private names by tests": [
            f"tests/test_parts.py:{place}"
            for place in ("2: _shared", "7: _shared", "8: _shared", "5: _size", "6: _grow")
        ],
    }


def test_sizes_count_files_and_lines(tree: list[str], tmp_path: Path) -> None:
    (tmp_path / "megarl/run/sync").mkdir()
    (tmp_path / "megarl/run/sync/push.py").write_text("a = 1\n\nb = 2\n")
    before = sum(file.startswith("megarl/") for file in tree)
    counted = tree_measures.sizes([*tree, "megarl/run/sync/push.py", "megarl/run/sync/page.md"])
    assert counted == {"Python files of megarl": before + 1, "lines of the weight sync": 3}


def test_a_figure_above_its_limit_fails_and_lists_its_places(
    tree: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tree_measures, "tracked_files", lambda: tree)
    assert tree_measures.main() == 1
    printed = capsys.readouterr().out
    assert "  -q/rows.jsonl: begins with -" in printed
    assert "same.py" not in printed  # within its limit
