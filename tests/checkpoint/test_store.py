from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import FileRecord, NewerFormatError, read_manifest
from megarl.checkpoint.store import CheckpointStore
from megarl.errors import DataError
from tests.checkpoint.run_folder import CONTENTS, save, write_files

FILE = "policy/__0_0.distcp"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


def silent(text: str) -> None:
    raise AssertionError(text)


def steps(store: CheckpointStore) -> list[int]:
    return [saved.step for saved in store.saved()]


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_checkpoint_has_all_its_files_in_the_manifest(store: CheckpointStore) -> None:
    folder = save(store, 20)
    assert folder == store.folder / "step-000020"
    assert names(store) == ["step-000020"]
    manifest = read_manifest(folder)
    expected = {FILE: b"w" * 100, "policy/.metadata": b"w" * 60, "state.json": b'{"step": 1}'}
    assert {name: (file.bytes, file.sha256) for name, file in manifest.files.items()} == {
        name: (len(content), sha256(content).hexdigest()) for name, content in expected.items()
    }
    assert (manifest.step, manifest.layout, manifest.model) == (20, CONTENTS.layout, CONTENTS.model)
    assert store.verify(folder) == []


def test_a_draft_is_not_seen_and_leaves_nothing(store: CheckpointStore) -> None:
    draft = store.begin(20)
    assert list(draft.folder.iterdir()) == []
    write_files(draft)
    assert store.saved() == []
    draft.discard()
    draft.discard()
    assert names(store) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({FILE: FileRecord(bytes=101, sha256="")}, "__0_0.distcp has 100 bytes, needs 101"),
        ({"policy/__1_0.distcp": FileRecord(bytes=1, sha256="")}, "lacks policy/__1_0.distcp, which was to be written"),
    ],
)
def test_files_that_are_not_as_their_writer_says(
    store: CheckpointStore, files: dict[str, FileRecord], message: str
) -> None:
    save(store, 20)
    draft = store.begin(40)
    write_files(draft)
    with pytest.raises(DataError, match=message):
        draft.commit(CONTENTS, files)
    assert steps(store) == [20]


class KilledError(BaseException):
    pass


CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")


def killed_at(monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], Any]) -> bool:
    """Whether `work` was ended at the `at`-th call that changes files, and at every one after it."""
    numbers, was_killed = count(), False

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal was_killed
            if next(numbers) >= at:
                was_killed = True
                raise KilledError
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(getattr(os, name)))
        try:
            work()
        except KilledError:
            assert was_killed
    return was_killed


@pytest.mark.parametrize("step", [20, 40])
def test_a_save_that_is_killed_anywhere_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Of another step, or of the same step again, which is the only one."""
    outcomes = []
    for at in count():
        run_dir = tmp_path / str(at)
        save(CheckpointStore(run_dir), 20, fill=b"a")
        was_killed = killed_at(monkeypatch, at, lambda run_dir=run_dir: save(CheckpointStore(run_dir), step, fill=b"b"))
        store = CheckpointStore(run_dir)
        assert all(store.verify(saved.folder) == [] for saved in store.saved())
        store.clean()
        newest = store.newest_whole(silent, deep=True)
        assert newest is not None
        content = (newest.folder / FILE).read_bytes()
        assert content == (b"b" if newest.step == 40 else content[:1]) * 100
        outcomes.append(content[:1])
        again = save(store, step, fill=b"c")
        assert (again / FILE).read_bytes() == b"c" * 100
        assert names(store) == ["step-000020", "step-000040"][: 1 + (step == 40)]
        if not was_killed:
            break
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)  # the old one, and from some call on the new one
    assert set(outcomes) == {b"a", b"b"}


def test_a_removal_that_is_killed_anywhere_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = set()
    for at in count():
        store = CheckpointStore(tmp_path / str(at))
        for step in (20, 40, 60):
            save(store, step)
        was_killed = killed_at(monkeypatch, at, lambda store=store: store.prune(keep_last=1, keep_every=0))
        assert all(store.verify(saved.folder) == [] for saved in store.saved())
        remaining.add(tuple(steps(store)))
        save(store, 80)
        assert all(not name.startswith(".") for name in names(store))
        if not was_killed:
            break
    assert remaining == {(20, 40, 60), (40, 60), (60,)}


def test_a_save_that_is_killed_by_the_system(store: CheckpointStore) -> None:
    save(store, 20)
    code = (
        "import sys; from megarl.checkpoint.store import CheckpointStore; from tests.checkpoint.run_folder import save;"
        "store = CheckpointStore(sys.argv[1]); step = 40\n"
        "while True: save(store, step); step += 20"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(store.folder.parent)])
    try:
        deadline = time.monotonic() + 30
        while len(steps(store)) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(steps(store)) >= 5
    assert all(store.verify(saved.folder) == [] for saved in store.saved())
    last = steps(store)[-1]
    save(store, last + 20)
    assert names(store) == [f"step-{step:06d}" for step in range(20, last + 40, 20)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_with(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: (f / FILE).unlink(), f"{FILE} is missing, needs 100 bytes"),
    "folder": (lambda f: shutil.rmtree(f / "policy"), "policy/.metadata is missing, needs 60 bytes"),
    "short": (lambda f: os.truncate(f / FILE, 10), f"{FILE} has 10 bytes, needs 100"),
    "manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "json": (lambda f: os.truncate(f / "manifest.json", 50), "manifest.json is not valid JSON: "),
    "binary": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is not valid JSON: "),
    "list": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json needs a JSON object, got list"),
    "empty": (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json needs a number from 1 under format_ver"),
    "edited": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace("100", "101")),
        "manifest.json has sha256 ",
    ),
    "other": (
        lambda f: shutil.copytree(f.parent / "step-000020", f, dirs_exist_ok=True),
        "manifest.json is of step 20",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_never_used(store: CheckpointStore, kind: str) -> None:
    do, message = DAMAGES[kind]
    save(store, 20)
    folder = save(store, 40)
    do(folder)
    assert store.verify(folder)[0].startswith(message)
    said: list[str] = []
    newest = store.newest_whole(said.append)
    assert newest is not None
    assert newest.step == 20
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint step-000040 is damaged: {message}")
    assert said[0].endswith("; step-000020 is used instead")
    for which in ("40", "step-000040", str(folder)):
        with pytest.raises(DataError, match="is damaged"):
            store.find(which, silent)
    assert store.find("auto", said.append).step == 20


def test_a_flipped_bit_is_found_by_reading(store: CheckpointStore) -> None:
    save(store, 20)
    folder = save(store, 40)
    flip(folder / FILE)
    needed, got = (sha256(content).hexdigest() for content in (b"w" * 100, (folder / FILE).read_bytes()))
    assert store.verify(folder) == [f"{FILE} has sha256 {got}, needs {needed}"]
    assert store.verify(folder, deep=False) == []
    said: list[str] = []
    newest = store.newest_whole(said.append, deep=True)
    assert newest is not None
    assert newest.step == 20
    assert "has sha256" in said[0]


def test_verification_names_what_does_not_belong_there(store: CheckpointStore) -> None:
    folder = save(store, 20)
    (folder / FILE).rename(folder / "policy" / "__0_1.distcp")
    (folder / "notes.txt").write_text("mine")
    assert store.verify(folder) == [
        f"{FILE} is missing, needs 100 bytes",
        "notes.txt is not in the manifest",
        "policy/__0_1.distcp is not in the manifest",
    ]


def test_every_byte_is_told_while_hashing(store: CheckpointStore) -> None:
    folder = save(store, 20)
    told: list[int] = []
    store.verify(folder, advance=told.append)
    assert sum(told) == read_manifest(folder).num_bytes == 100 + 60 + 11


def test_none_is_whole(store: CheckpointStore) -> None:
    for step in (20, 40):
        (save(store, step) / FILE).unlink()
    said: list[str] = []
    assert store.newest_whole(said.append) is None
    assert [text.partition(" is damaged")[0] for text in said] == ["checkpoint step-000040", "checkpoint step-000020"]
    assert said[0].endswith("; there is none that is whole")
    with pytest.raises(DataError, match=r"has no checkpoint that is whole; .* has those of steps 20, 40"):
        store.find("auto", said.append)


def test_what_a_newer_megarl_wrote_is_refused_and_not_skipped(store: CheckpointStore) -> None:
    save(store, 20)
    folder = save(store, 40)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"format_version": 2, "shards": []}))
    message = r"step-000040 is of format 2, this megarl reads up to 1; needs a newer megarl"
    with pytest.raises(NewerFormatError, match=message):
        store.newest_whole(silent)
    with pytest.raises(DataError, match=message):
        store.find("40", silent)
    assert store.find("20", silent).step == 20
    assert store.prune(keep_last=1, keep_every=0) == []


def test_what_is_found(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no checkpoint that is whole; .*run/checkpoints has no checkpoints$"):
        store.find("auto", silent)
    for step in (20, 40):
        save(store, step)
    other = save(CheckpointStore(tmp_path / "other"), 7)
    assert [store.find(which, silent).step for which in ("auto", "20", "step-000020", str(other))] == [40, 20, 20, 7]
    copied = other.rename(tmp_path / "best")
    assert (store.find(str(copied), silent).step, store.find(str(copied), silent).name) == (7, "best")
    with pytest.raises(DataError, match=r"there is no checkpoint of step 30; .* has those of steps 20, 40"):
        store.find("30", silent)
    with pytest.raises(DataError, match="there is no folder newest"):
        store.find("newest", silent)
    with pytest.raises(DataError, match=r"run is the folder of a run; .* has those of steps 20, 40"):
        store.find(str(tmp_path / "run"), silent)


def test_only_names_of_checkpoints_count(store: CheckpointStore) -> None:
    save(store, 20)
    save(store, 1_000_000)
    for name in ("step-20", "step-0000040", "step-final", "step-000060.old"):
        (store.folder / name).mkdir()
    (store.folder / "step-000080").write_text("a file")
    assert steps(store) == [20, 1_000_000]


def test_retention_is_what_counting_gives(store: CheckpointStore) -> None:
    rng = random.Random(0)
    for trial in range(40):
        shutil.rmtree(store.folder, ignore_errors=True)
        all_steps = sorted(rng.sample(range(1, 30), rng.randint(1, 6)))
        damaged = {step for step in all_steps if rng.random() < 0.3}
        for step in all_steps:
            folder = save(store, step)
            if step in damaged:
                (folder / FILE).unlink()
        last, every = rng.randint(1, 3), rng.choice([0, 2, 5])
        expected = []
        for step in all_steps:
            whole_after = [other for other in all_steps if other > step and other not in damaged]
            counted = whole_after if step not in damaged else [other for other in all_steps if other > step]
            if len(counted) < last or (every > 0 and step % every == 0) or damaged == set(all_steps):
                expected.append(step)
        gone = store.prune(keep_last=last, keep_every=every)
        assert steps(store) == expected, (trial, all_steps, damaged, last, every)
        assert [saved.step for saved in gone] == [step for step in all_steps if step not in expected]
        if whole := set(all_steps) - damaged:
            assert max(whole) in steps(store)


def test_a_full_disk_is_told_before_and_while_saving(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 20)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=3 * 2**28))
    store.require_room(2**29, step=40)
    with pytest.raises(DataError, match=r"needs 1.26 GiB for the checkpoint of step 40, has 0.75 GiB free"):
        store.require_room(int(1.2 * 2**30), step=40)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    draft = store.begin(40)
    write_files(draft)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        draft.commit(CONTENTS, {})
    draft.discard()
    assert names(store) == ["step-000020"]


def test_room_is_looked_for_where_the_run_will_be(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "not" / "there").require_room(1, step=20)
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_takes_no_whole_one_s_place(store: CheckpointStore) -> None:
    for step in (20, 40, 60):
        save(store, step)
    for step in (40, 60):
        flip(store.folder / f"step-{step:06d}" / FILE)
    assert store.prune(keep_last=1, keep_every=0, newest=0) == []
    assert [saved.step for saved in store.prune(keep_last=1, keep_every=0, newest=20)] == [40]
    assert steps(store) == [20, 60]


def test_what_cannot_be_read_is_neither_nothing_nor_a_crash(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 20)
    folder = save(store, 40)
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.parent == folder or folder / "policy" in path.parents:
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    def listing(path: Path) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        said: list[str] = []
        newest = store.newest_whole(said.append, deep=True)
        assert newest is not None
        assert newest.step == 20
        assert said == [
            "checkpoint step-000040 is damaged: manifest.json cannot be read: Permission denied; "
            "step-000020 is used instead"
        ]
        with pytest.raises(DataError, match=r"^checkpoint .*step-000040 cannot be read: Permission denied$"):
            store.find(str(folder), silent)
        patch.setattr(Path, "iterdir", listing)
        for read in (store.saved, store.clean, lambda: store.find("auto", silent)):
            with pytest.raises(DataError, match=r"^.*/checkpoints cannot be read: Input/output error$"):
                read()
    with pytest.raises(DataError, match=r"^checkpoint a+ cannot be read: File name too long$"):
        store.find("a" * 300, silent)


def test_files_in_a_folder_that_cannot_be_read(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(store, 20)
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == "__0_0.distcp":
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert store.verify(folder) == [f"{FILE} cannot be read: Permission denied"]


def test_a_folder_that_is_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 20)
    for which in (str(tmp_path), str(store.folder / "step-000020" / "policy")):
        with pytest.raises(DataError, match=rf"^{which} is no checkpoint: it has no manifest\.json; .* steps 20$"):
            store.find(which, silent)
    with pytest.raises(DataError, match=r"^there is no folder ''; "):
        store.find("", silent)


def test_what_cannot_be_removed_does_not_make_a_save_fail(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 20, fill=b"a")

    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        folder = save(store, 20, fill=b"b")
        store.begin(40).discard()
        folder = save(store, 20, fill=b"c")
    assert (folder / FILE).read_bytes() == b"c" * 100
    store.clean()
    assert names(store) == ["step-000020"]


def test_one_that_was_moved_and_linked_is_pruned_as_a_link(store: CheckpointStore, tmp_path: Path) -> None:
    moved = save(store, 20).rename(tmp_path / "kept")
    (store.folder / "step-000020").symlink_to(moved)
    assert store.find("20", silent).step == 20
    save(store, 40)
    assert [saved.step for saved in store.prune(keep_last=1, keep_every=0)] == [20]
    assert names(store) == ["step-000040"]
    assert store.verify(moved) == []
    save(store, 60)
