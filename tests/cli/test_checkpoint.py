"""`megarl checkpoint ls | verify | prune` on a run folder with small files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import hash_file
from megarl.checkpoint.run_lock import RunLock
from megarl.checkpoint.store import CheckpointStore
from megarl.config import RunConfig, dump_config
from megarl.config.load import make_config
from tests.checkpoint.run_folder import METADATA, write_files
from tests.time_limits import HANG_SECONDS

FILE = "policy/__0_0.distcp"


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """Relative path of a run folder with checkpoints of steps 20 to 80; the run keeps the latest and every 40th."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megarl.checkpoint.manifest.REPORT_SECONDS", HANG_SECONDS)
    folder = Path("runs/demo")
    tree: dict[str, Any] = {"run_dir": str(folder), "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    config = dump_config(make_config(RunConfig, tree, ["checkpoint.keep_last=1", "checkpoint.keep_every=40"]))
    store = CheckpointStore(folder)
    for step in (20, 40, 60, 80):
        draft = store.begin(step)
        write_files(draft)
        (draft.folder / "config.yaml").write_text(config)
        draft.commit(METADATA, {FILE: hash_file(draft.folder / FILE)})
    return folder


@pytest.fixture
def rows(output, run_dir: Path) -> Callable[[], dict[int, dict[str, Any]]]:
    """Function that returns step -> what `ls --json` prints."""

    def list_rows() -> dict[int, dict[str, Any]]:
        found = [json.loads(line) for line in output("checkpoint", "ls", run_dir, "--json").splitlines()]
        return {row.pop("step"): row for row in found}

    return list_rows


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def corrupt(run_dir: Path, *steps: int) -> None:
    for step in steps:
        (checkpoint_folder(run_dir, step) / FILE).write_bytes(b"v" * 100)


def test_ls_json(run_dir, rows):
    (checkpoint_folder(run_dir, 60) / FILE).unlink()
    found = rows()
    assert {step: (row["whole"], row["kept_by"]) for step, row in found.items()} == {
        20: (True, None),
        40: (True, "keep_every"),
        60: (False, None),
        80: (True, "keep_last"),
    }
    assert found[60]["problems"] == [f"{FILE} is missing, needs 100 bytes"]
    assert found[40]["layout"] == {"policy": {"tp": 2, "pp": 1, "world": 4}}
    assert found[40]["created"].endswith("+00:00")
    on_disk = sum(path.stat().st_size for path in checkpoint_folder(run_dir, 40).rglob("*") if path.is_file())
    assert found[40]["bytes"] == on_disk


def test_ls_table(run_dir, output):
    (checkpoint_folder(run_dir, 60) / "manifest.json").unlink()
    with RunLock(run_dir):
        lines = output("checkpoint", "ls", run_dir).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[0] == ["step", "created", "size", "layout", "valid", "kept by"]
    assert [(row[0], *row[3:]) for row in cells[1:5]] == [
        ("20", "policy tp=2 world=4", "yes", "nothing"),
        ("40", "policy tp=2 world=4", "yes", "keep_every"),
        ("60", "-", "no", "nothing"),
        ("80", "policy tp=2 world=4", "yes", "keep_last"),
    ]
    assert cells[1][1].endswith(" UTC")
    assert cells[1][2].endswith(" kB")
    assert lines[5] == "step 60: manifest.json is missing"
    assert lines[6].startswith("in use by pid ")


def test_ls_of_a_run_without_checkpoints(tmp_path, output):
    assert output("checkpoint", "ls", tmp_path) == f"{tmp_path}/checkpoints has no checkpoints\n"
    assert output("checkpoint", "ls", tmp_path, "--json") == ""


@pytest.mark.parametrize(
    ("version", "age", "remedy"),
    [
        (1, "older", "start a new run, or resume with the version that wrote the checkpoint"),
        (3, "newer", "use the newer version that wrote the checkpoint"),
    ],
)
def test_a_checkpoint_in_another_format_is_reported_and_kept(run_dir, rows, run, version, age, remedy):
    folder = checkpoint_folder(run_dir, 80)
    (folder / "manifest.json").write_text(json.dumps({"format_version": version}))
    message = f"checkpoint {folder} has format {version}, but this version of megarl reads format 2: {remedy}"
    row = rows()[80]
    assert (row["whole"], row["kept_by"], row["problems"]) == (False, f"{age} format", [message])
    code, out, err = run("checkpoint", "verify", run_dir, "80")
    assert (code, out.split()[:2]) == (1, ["step-000080", age])
    assert f"error: step-000080: {message}" in err
    code, out, err = run("checkpoint", "prune", run_dir, "--keep-last", "1", "--keep-every", "0")
    assert code == 0
    assert f"error: step-000080: {message}" in err
    assert f"({age} format)" in out
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-000060", "step-000080"]


def test_verify_reports_the_file_and_the_failed_check(run_dir, run):
    steps = (20, 40, 60, 80)
    code, out, err = run("checkpoint", "verify", run_dir)
    found = [line.split()[:4] for line in out.splitlines()]
    assert (code, found) == (0, [[f"step-0000{step}", "valid", "5", "files"] for step in steps])
    assert err == "".join(f"reading step-0000{step}\n" for step in steps)
    corrupt(run_dir, 40)
    code, out, err = run("checkpoint", "verify", run_dir)
    assert (code, [line.split()[1] for line in out.splitlines()]) == (1, ["valid", "damaged", "valid", "valid"])
    assert f"error: step-000040: {FILE} has sha256 " in err
    assert [run("checkpoint", "verify", run_dir, step)[0] for step in ("20", "40")] == [0, 1]


def test_prune_follows_the_retention_rules_of_the_run(run_dir, rows, output):
    draft = CheckpointStore(run_dir).begin(100)
    out = output("checkpoint", "prune", run_dir, "--dry-run")
    printed = [" ".join(line.split()[:-2]) for line in out.splitlines() if "remove" in line]
    assert printed == ["would remove step-000020", "would remove step-000060"]
    assert draft.folder.exists()
    assert len(rows()) == 4
    out = output("checkpoint", "prune", run_dir)
    assert f"removed  {draft.folder.name}, which is incomplete" in out
    assert "keeping       step-000080" in out
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000040", "step-000080"]
    assert [path.name for path in run_dir.iterdir()] == ["checkpoints"]


def test_prune_options_override_the_retention_rules(run_dir, rows, output):
    output("checkpoint", "prune", run_dir, "--keep-last", "2", "--keep-every", "0")
    assert set(rows()) == {60, 80}


def test_prune_rejects_a_run_in_use(run_dir, rows, refusal):
    with RunLock(run_dir):
        assert refusal("checkpoint", "prune", run_dir).startswith("error: run_dir runs/demo is in use by pid ")
    assert len(rows()) == 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["ls", "runs/none"], "there is no folder runs/none"),
        (["verify", "runs/demo", "30"], "has no checkpoint of step 30; it has steps 20, 40, 60, 80"),
        (["verify", "runs"], "runs/checkpoints has no checkpoints"),
        (["prune", "runs/demo", "--keep-last", "0"], "--keep-last needs to be at least 1, got 0"),
        (["prune", "runs/demo", "--keep-every", "-1"], "--keep-every needs to be at least 0, got -1"),
    ],
)
@pytest.mark.usefixtures("run_dir")
def test_invalid_arguments_are_rejected(command, message, refusal):
    assert message in refusal("checkpoint", *command)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_prune_verifies_the_checkpoint_that_it_keeps(dry, run_dir, rows, run):
    corrupt(run_dir, 80)
    code, out, err = run("checkpoint", "prune", run_dir, "--keep-every", "0", *dry)
    assert code == 0
    assert f"error: step-000080: {FILE} has sha256 " in err
    printed = [line.split() for line in out.splitlines()]
    assert [(row[-4 if row[0] == "keeping" else -3], row[0]) for row in printed] == [
        ("step-000020", "would" if dry else "removing"),
        ("step-000040", "would" if dry else "removing"),
        ("step-000060", "keeping"),
        ("step-000080", "keeping"),
    ]
    assert set(rows()) == ({20, 40, 60, 80} if dry else {60, 80})


def test_prune_removes_nothing_if_no_checkpoint_is_valid(run_dir, rows, output):
    corrupt(run_dir, 20, 40, 60, 80)
    assert output("checkpoint", "prune", run_dir).count("(none is valid)") == 2
    assert len(rows()) == 4


def test_unknown_keys_of_another_version_are_ignored(run_dir, rows):
    config = (checkpoint_folder(run_dir, 80) / "config.yaml").read_text()
    draft = CheckpointStore(run_dir).begin(100)
    changed = config.replace("checkpoint:\n", "checkpoint:\n  new: 1\n")
    (draft.folder / "config.yaml").write_text(f"novel: 1\n{changed}")
    draft.commit(METADATA, {})
    kept = {step: row["kept_by"] for step, row in rows().items()}
    assert kept == {20: None, 40: "keep_every", 60: None, 80: "keep_every", 100: "keep_last"}


def test_a_checkpoint_removed_during_verify_is_not_reported_as_damaged(run_dir, run, monkeypatch):
    verify = CheckpointStore.verify

    def verify_after_removal(store, folder, **options):
        if folder.name == "step-000020":
            shutil.rmtree(folder)
        return verify(store, folder, **options)

    monkeypatch.setattr(CheckpointStore, "verify", verify_after_removal)
    code, out, err = run("checkpoint", "verify", run_dir)
    assert (code, out.splitlines()[0]) == (0, "step-000020  removed while it was read")
    assert "error" not in err


def test_verify_prints_progress(run_dir, run, monkeypatch):
    monkeypatch.setattr("megarl.checkpoint.manifest.REPORT_SECONDS", 0.0)
    code, _, err = run("checkpoint", "verify", run_dir, "20")
    printed = "comparing step-000020 with its checksums: 0.0 GiB read"
    assert (code, err.splitlines()) == (0, ["reading step-000020", *[printed] * 4])
