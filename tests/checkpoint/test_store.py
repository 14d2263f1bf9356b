"""Checkpoint store: atomic saves, damage, retention, and what a killed process leaves behind."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import FileRecord, NewerFormatError, OlderFormatError, read_manifest
from megarl.checkpoint.run_lock import RunLock
from megarl.checkpoint.store import CheckpointStore
from megarl.errors import DataError, LostLockError
from tests.checkpoint.run_folder import METADATA, save_checkpoint, take_over, write_files, write_format_1_manifest
from tests.errors import expect_error
from tests.time_limits import wait_until

FILE = "policy/__0_0.distcp"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


def fail_on_message(text: str) -> None:
    raise AssertionError(text)


def steps(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store.entries()]


def newest_step(store: CheckpointStore, notify: Callable[[str], None], *, deep: bool = False) -> int | None:
    newest = store.latest_valid(notify, deep=deep)
    return None if newest is None else newest.step


def folder_names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_the_manifest_lists_all_files(store):
    folder = save_checkpoint(store, 20)
    assert folder == store.folder / "step-000020"
    assert folder_names(store) == ["step-000020"]
    manifest = read_manifest(folder)
    expected = {FILE: b"w" * 100, "policy/.metadata": b"w" * 60, "state.json": b'{"step": 1}'}
    assert {name: (file.bytes, file.sha256) for name, file in manifest.files.items()} == {
        name: (len(content), sha256(content).hexdigest()) for name, content in expected.items()
    }
    assert (manifest.step, manifest.layout, manifest.model) == (20, METADATA.layout, METADATA.model)
    reported: list[int] = []
    assert store.verify(folder, advance=reported.append) == []
    assert sum(reported) == manifest.num_bytes == 100 + 60 + 11


def test_an_uncommitted_checkpoint_is_not_listed_and_discard_removes_it(store):
    pending = store.begin(20)
    assert list(pending.folder.iterdir()) == []
    write_files(pending)
    assert store.entries() == []
    pending.discard()
    pending.discard()
    assert folder_names(store) == []


@pytest.mark.parametrize(
    ("file", "num_bytes", "message"),
    [
        (FILE, 101, "__0_0.distcp has 100 bytes, needs 101"),
        ("policy/__1_0.distcp", 1, "lacks policy/__1_0.distcp, which its writer reported as written"),
    ],
)
def test_commit_refuses_files_that_differ_from_their_records(store, file, num_bytes, message):
    save_checkpoint(store, 20)
    pending = store.begin(40)
    write_files(pending)
    with pytest.raises(DataError, match=message):
        pending.commit(METADATA, {file: FileRecord(bytes=num_bytes, sha256="")})
    assert steps(store) == [20]


def test_a_run_that_lost_its_folder_neither_commits_nor_removes_checkpoints(store):
    with RunLock(store.folder.parent):
        save_checkpoint(store, 20)
        pending = store.begin(40)
        write_files(pending)
        take_over(store.folder.parent)
        with expect_error(LostLockError, "123", "n2"):
            pending.commit(METADATA, {})
        with pytest.raises(LostLockError):
            store.begin(40)  # its new owner writes it
    assert folder_names(store) == [pending.folder.name, "step-000020"]


class KilledError(BaseException):
    pass


CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")


def run_killed_at(monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], Any]) -> bool:
    """Run `work`, raising at the `at`-th call that changes files and at every later one; return whether it raised."""
    numbers, was_killed = count(), False

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal was_killed
            if next(numbers) >= at:
                was_killed = True
                raise KilledError
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except KilledError:
            assert was_killed
    return was_killed


@pytest.mark.parametrize("step", [20, 40])
def test_a_save_killed_at_any_file_operation_leaves_a_valid_checkpoint(tmp_path, monkeypatch, step):
    """The save is of another step, or replaces the only checkpoint."""
    outcomes = []
    for at in count():
        run_dir = tmp_path / str(at)
        save_checkpoint(CheckpointStore(run_dir), 20, byte=b"a")
        store = CheckpointStore(run_dir)
        save = partial(save_checkpoint, CheckpointStore(run_dir), step, byte=b"b")
        was_killed = run_killed_at(monkeypatch, at, save)
        assert all(store.verify(entry.folder) == [] for entry in store.entries())
        store.remove_partial()
        newest = store.latest_valid(fail_on_message, deep=True)
        assert newest is not None
        content = (newest.folder / FILE).read_bytes()
        assert content == (b"b" if newest.step == 40 else content[:1]) * 100
        outcomes.append(content[:1])
        again = save_checkpoint(store, step, byte=b"c")
        assert (again / FILE).read_bytes() == b"c" * 100
        assert folder_names(store) == ["step-000020", "step-000040"][: 1 + (step == 40)]
        if not was_killed:
            break
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)  # the old content up to some call, then the new
    assert set(outcomes) == {b"a", b"b"}


def test_a_removal_killed_at_any_file_operation_leaves_no_incomplete_checkpoint(tmp_path, monkeypatch):
    remaining = set()
    for at in count():
        store = CheckpointStore(tmp_path / str(at))
        for step in (20, 40, 60):
            save_checkpoint(store, step)
        was_killed = run_killed_at(monkeypatch, at, lambda store=store: store.prune(keep_last=1, keep_every=0))
        assert all(store.verify(entry.folder) == [] for entry in store.entries())
        remaining.add(tuple(steps(store)))
        save_checkpoint(store, 80)
        assert all(not name.startswith(".") for name in folder_names(store))
        if not was_killed:
            break
    assert remaining == {(20, 40, 60), (40, 60), (60,)}


def test_a_save_killed_by_sigkill_leaves_valid_checkpoints(store):
    save_checkpoint(store, 20)
    code = (
        "import sys; from megarl.checkpoint.store import CheckpointStore\n"
        "from tests.checkpoint.run_folder import save_checkpoint\n"
        "store = CheckpointStore(sys.argv[1]); step = 40\n"
        "while True: save_checkpoint(store, step); step += 20"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(store.folder.parent)])
    try:
        wait_until(lambda: len(steps(store)) >= 5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(steps(store)) >= 5
    assert all(store.verify(entry.folder) == [] for entry in store.entries())
    last = steps(store)[-1]
    save_checkpoint(store, last + 20)
    assert folder_names(store) == [f"step-{step:06d}" for step in range(20, last + 40, 20)]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("100", "101"))


def replace_with(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: (f / FILE).unlink(), f"{FILE} is missing, needs 100 bytes"),
    "folder": (lambda f: shutil.rmtree(f / "policy"), "policy/.metadata is missing, needs 60 bytes"),
    "short": (lambda f: os.truncate(f / FILE, 10), f"{FILE} has 10 bytes, needs 100"),
    "manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "json": (lambda f: os.truncate(f / "manifest.json", 50), "manifest.json is not valid JSON: "),
    "binary": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is not valid JSON: "),
    "list": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json needs a JSON object, got list"),
    "empty": (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json needs an integer of at least 1 under f"),
    "edited": (lambda f: edit(f / "manifest.json"), "manifest.json has sha256 "),
    "other": (lambda f: replace_with(f, f.parent / "step-000020"), "manifest.json belongs to step 20"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_never_selected(store, kind):
    do, message = DAMAGE[kind]
    save_checkpoint(store, 20)
    folder = save_checkpoint(store, 40)
    do(folder)
    assert store.verify(folder)[0].startswith(message)
    messages: list[str] = []
    assert newest_step(store, messages.append) == 20
    assert len(messages) == 1
    assert messages[0].startswith(f"checkpoint step-000040 is damaged: {message}")
    assert messages[0].endswith("; step-000020 is used instead")
    for which in ("40", "step-000040", str(folder)):
        with expect_error(DataError, "damaged"):
            store.find(which, fail_on_message)
    assert store.find("auto", messages.append).step == 20


def test_a_flipped_bit_is_found_by_checksums(store):
    save_checkpoint(store, 20)
    folder = save_checkpoint(store, 40)
    flip_bit(folder / FILE)
    needed, got = (sha256(content).hexdigest() for content in (b"w" * 100, (folder / FILE).read_bytes()))
    assert store.verify(folder) == [f"{FILE} has sha256 {got}, needs {needed}"]
    assert store.verify(folder, deep=False) == []
    messages: list[str] = []
    assert newest_step(store, messages.append, deep=True) == 20
    assert "has sha256" in messages[0]


def test_verify_reports_files_that_are_not_in_the_manifest(store):
    folder = save_checkpoint(store, 20)
    (folder / FILE).rename(folder / "policy" / "__0_1.distcp")
    (folder / "notes.txt").write_text("mine")
    unknown = [f"{name} is not in the manifest" for name in ("notes.txt", "policy/__0_1.distcp")]
    assert store.verify(folder) == [f"{FILE} is missing, needs 100 bytes", *unknown]


def test_all_checkpoints_damaged(store):
    for step in (20, 40):
        (save_checkpoint(store, step) / FILE).unlink()
    messages: list[str] = []
    assert store.latest_valid(messages.append) is None
    assert [text.partition(" is damaged")[0] for text in messages] == [f"checkpoint step-0000{n}" for n in (40, 20)]
    assert messages[0].endswith("; there is no valid one")
    with expect_error(DataError, "20", "40", "checkpoints", "checkpoint"):
        store.find("auto", messages.append)


@pytest.mark.parametrize(
    ("version", "kind", "message"),
    [
        (1, OlderFormatError, "has format 1, but this version of megarl reads format 2: start a new run, or resume"),
        (3, NewerFormatError, "has format 3, but this version of megarl reads format 2: use the newer version"),
    ],
)
def test_other_formats_are_refused_and_not_skipped(store, version, kind, message):
    save_checkpoint(store, 20)
    folder = save_checkpoint(store, 40)
    if version == 1:
        write_format_1_manifest(folder, 40)
    else:
        (folder / "manifest.json").write_text(json.dumps({"format_version": version, "shards": []}))
    reads: tuple[Callable[[], object], ...] = (
        lambda: store.latest_valid(fail_on_message),
        lambda: store.latest_valid(fail_on_message, deep=True),
        lambda: store.verify(folder),
        *(lambda which=which: store.find(which, fail_on_message) for which in ("auto", "40", folder.name, str(folder))),
    )
    for read in reads:
        with pytest.raises(kind, match=f"^checkpoint {folder} {message}") as error:
            read()
        assert error.value.exit_code == DataError.exit_code
    assert store.find("20", fail_on_message).step == 20
    if version == 1:
        kept = store.retention(keep_last=1, keep_every=0)
        assert {entry.step: kept_by for entry, kept_by in kept.items()} == {20: "keep_last", 40: "older format"}
    assert store.prune(keep_last=1, keep_every=0) == []


def test_find_accepts_auto_a_step_a_name_or_a_folder(store, tmp_path):
    with expect_error(DataError, "run/checkpoints"):
        store.find("auto", fail_on_message)
    for step in (20, 40):
        save_checkpoint(store, step)
    other = save_checkpoint(CheckpointStore(tmp_path / "other"), 7)
    for which, step in {"auto": 40, "20": 20, "step-000020": 20, str(other): 7}.items():
        assert store.find(which, fail_on_message).step == step
    copied = other.rename(tmp_path / "best")
    assert (store.find(str(copied), fail_on_message).step, store.find(str(copied), fail_on_message).name) == (7, "best")
    with expect_error(DataError, "30", "20", "40", "checkpoints", "checkpoint"):
        store.find("30", fail_on_message)
    with expect_error(DataError, "folder", "newest"):
        store.find("newest", fail_on_message)
    with expect_error(DataError, "20", "40", "checkpoints", "checkpoint"):
        store.find(str(tmp_path / "run"), fail_on_message)


def test_only_folders_with_checkpoint_names_are_listed(store):
    save_checkpoint(store, 20)
    save_checkpoint(store, 1_000_000)
    for name in ("step-20", "step-0000040", "step-final", "step-000060.old"):
        (store.folder / name).mkdir()
    (store.folder / "step-000080").write_text("a file")
    assert steps(store) == [20, 1_000_000]


def test_retention_matches_a_reference_implementation(store):
    rng = random.Random(0)
    for trial in range(40):
        shutil.rmtree(store.folder, ignore_errors=True)
        all_steps = sorted(rng.sample(range(1, 30), rng.randint(1, 6)))
        damaged = {step for step in all_steps if rng.random() < 0.3}
        for step in all_steps:
            folder = save_checkpoint(store, step)
            if step in damaged:
                (folder / FILE).unlink()
        last, every = rng.randint(1, 3), rng.choice([0, 2, 5])
        expected = []
        for step in all_steps:
            valid_after = [other for other in all_steps if other > step and other not in damaged]
            counted = valid_after if step not in damaged else [other for other in all_steps if other > step]
            if len(counted) < last or (every > 0 and step % every == 0) or damaged == set(all_steps):
                expected.append(step)
        removed = store.prune(keep_last=last, keep_every=every)
        assert steps(store) == expected, (trial, all_steps, damaged, last, every)
        assert [entry.step for entry in removed] == [step for step in all_steps if step not in expected]
        if valid := set(all_steps) - damaged:
            assert max(valid) in steps(store)


def test_a_full_disk_is_reported_before_and_during_a_save(store, monkeypatch):
    save_checkpoint(store, 20)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=3 * 2**28) if Path(path).exists() else None)
    store.require_disk_space(2**29, step=40)
    CheckpointStore(store.folder / "not" / "there").require_disk_space(2**29, step=40)  # of the nearest parent
    assert not (store.folder / "not").exists()
    with expect_error(DataError, "1.26 GiB", "40", "0.75 GiB"):
        store.require_disk_space(int(1.2 * 2**30), step=40)

    def full(handle):
        raise OSError(28, "No space left on device")

    pending = store.begin(40)
    write_files(pending)
    monkeypatch.setattr(os, "fsync", full)
    with expect_error(DataError, "No", "written", "cannot"):
        pending.commit(METADATA, {})
    pending.discard()
    assert folder_names(store) == ["step-000020"]


def test_a_checkpoint_with_a_flipped_bit_does_not_displace_a_valid_one(store):
    for step in (20, 40, 60):
        save_checkpoint(store, step)
    for step in (40, 60):
        flip_bit(store.folder / f"step-{step:06d}" / FILE)
    assert store.prune(keep_last=1, keep_every=0, newest=0) == []
    assert [entry.step for entry in store.prune(keep_last=1, keep_every=0, newest=20)] == [40]
    assert steps(store) == [20, 60]


def deny(patch: pytest.MonkeyPatch, condition: Callable[[Path], bool]) -> None:
    """Refuse what tells about some files, as to another user."""
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if condition(path):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    patch.setattr(Path, "stat", stat)


def test_unreadable_checkpoints_and_folders_are_reported(store, tmp_path, monkeypatch):
    save_checkpoint(store, 20)
    folder = save_checkpoint(store, 40)

    def listing(path):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        deny(patch, lambda path: path.parent == folder or folder / "policy" in path.parents)
        messages: list[str] = []
        assert newest_step(store, messages.append, deep=True) == 20
        (message,) = messages
        assert message.startswith("checkpoint step-000040 is damaged: manifest.json cannot be read: Permission denied;")
        with expect_error(DataError, "step-000040", "Permission"):
            store.find(str(folder), fail_on_message)
        patch.setattr(Path, "iterdir", listing)
        for read in (store.entries, store.remove_partial, lambda: store.find("auto", fail_on_message)):
            with expect_error(DataError, "/checkpoints", "Input/output"):
                read()
    with pytest.raises(DataError, match=r"^checkpoint a+ cannot be read: File name too long$"):
        store.find("a" * 300, fail_on_message)
    deny(monkeypatch, lambda path: path.name == "__0_0.distcp")
    assert store.verify(folder) == [f"{FILE} cannot be read: Permission denied"]


def test_a_folder_without_a_manifest_is_refused(store, tmp_path):
    save_checkpoint(store, 20)
    for which in (str(tmp_path), str(store.folder / "step-000020" / "policy")):
        with expect_error(DataError, f"{which} ", "manifest.json", "steps 20"):
            store.find(which, fail_on_message)
    with expect_error(DataError, "folder", "there"):
        store.find("", fail_on_message)


def test_a_failed_removal_does_not_fail_a_save(store, monkeypatch):
    save_checkpoint(store, 20, byte=b"a")

    def busy(path):
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        folder = save_checkpoint(store, 20, byte=b"b")
        store.begin(40).discard()
        folder = save_checkpoint(store, 20, byte=b"c")
    assert (folder / FILE).read_bytes() == b"c" * 100
    store.remove_partial()
    assert folder_names(store) == ["step-000020"]


def test_a_symlinked_checkpoint_is_pruned_by_removing_the_link(store, tmp_path):
    moved = save_checkpoint(store, 20).rename(tmp_path / "kept")
    (store.folder / "step-000020").symlink_to(moved)
    assert store.find("20", fail_on_message).step == 20
    save_checkpoint(store, 40)
    assert [entry.step for entry in store.prune(keep_last=1, keep_every=0)] == [20]
    assert folder_names(store) == ["step-000040"]
    assert store.verify(moved) == []
    save_checkpoint(store, 60)
