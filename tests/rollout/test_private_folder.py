import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.rollout.private_folder import PrivateFolder

MAKE = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from megarl.rollout.private_folder import PrivateFolder; "
WAIT = "folder = PrivateFolder('engine-'); print(folder.path, flush=True); sys.stdin.read()"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(temporary):
    strangers = temporary / "engine-of-somebody-else"
    strangers.mkdir()
    command = [sys.executable, "-c", MAKE + WAIT, str(temporary)]
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
        assert set(temporary.iterdir()) == {strangers, Path(first.path), Path(second.path)}
    finally:
        other.kill()
        other.communicate()
    for folder in (first, second, first):
        folder.remove()
    assert list(temporary.iterdir()) == [strangers]
