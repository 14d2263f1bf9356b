"""A run of a model that is named by its hub id, and its resumption after the hub has got a newer commit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config import load_resolved
from tests.end_to_end.conftest import Launch
from tests.end_to_end.tiny_world import write_sft
from tests.model_files.fake_hub import serve_hub

pytestmark = pytest.mark.slow


def test_resumed_run_uses_the_commit_that_it_began_with(
    world: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in (world / "model").iterdir()}
    config = write_sft(world, tmp_path, model={"path": "org/tiny"}, checkpoint={"every": 1})
    patient = {"HF_HUB_ETAG_TIMEOUT": "1200", "HF_HUB_DOWNLOAD_TIMEOUT": "1200"}
    for name, value in {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        **patient,
    }.items():
        monkeypatch.setenv(name, value)
    with serve_hub() as hub:
        commit = hub.commit("org/tiny", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        first = launch("sft", str(config))
        assert first.wait() == 0, first.stderr
        assert f"model.path: org/tiny is commit {commit}, in {tmp_path}/hf/hub/" in first.stderr
        assert hub.commit("org/tiny", {**files, "chat_template.jinja": b"{{ messages }}"}) != commit
        again = launch("sft", str(config), "--resume", "auto", "--set", "trainer.steps=4")
        assert again.wait() == 0, again.stderr
    resolved = load_resolved(tmp_path / "run" / "sft.yaml")
    assert resolved.model.hub_revisions == {"org/tiny": commit}
    assert Path(resolved.model.path).name == commit
    saved = yaml.safe_load((tmp_path / "run/checkpoints/step-000004/config.yaml").read_text())
    assert saved["model"] == resolved.model.model_dump(mode="json")
