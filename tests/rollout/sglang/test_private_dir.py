import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.rollout.sglang import private_dir
from megarl.rollout.sglang.private_dir import PrivateFolder

IMPORTS = """import sys, tempfile; tempfile.tempdir = sys.argv[1]
from megarl.rollout.sglang.private_dir import PrivateFolder
"""
CREATE_AND_WAIT = "folder = PrivateFolder('engine-'); print(folder.path, flush=True); sys.stdin.read()"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_folders_of_dead_processes_are_removed(temporary):
    unrelated = temporary / "engine-of-somebody-else"
    unrelated.mkdir()
    command = [sys.executable, "-c", IMPORTS + CREATE_AND_WAIT, str(temporary)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "socket").touch()
        first = PrivateFolder("engine-")
        assert theirs.exists()
        other.kill()
        other.wait()
        second = PrivateFolder("engine-")
        assert not theirs.exists()
        assert set(temporary.iterdir()) == {unrelated, Path(first.path), Path(second.path)}
    finally:
        other.kill()
        other.communicate()
    for folder in (first, second, first):
        folder.remove()
    assert list(temporary.iterdir()) == [unrelated]


def test_folder_that_is_removed_before_it_is_locked_is_created_again(temporary, monkeypatch):
    removed = []

    def flock(file, operation):
        if operation == fcntl.LOCK_EX and not removed:
            (folder,) = temporary.iterdir()
            removed.append(folder)
            private_dir._remove_abandoned(folder)
            assert not folder.exists()
        return before(file, operation)

    before = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    folder = PrivateFolder("engine-")
    assert Path(folder.path).is_dir()
    assert list(temporary.iterdir()) == [Path(folder.path)]
    private_dir._remove_abandoned(Path(folder.path))
    assert Path(folder.path).is_dir()
    folder.remove()
