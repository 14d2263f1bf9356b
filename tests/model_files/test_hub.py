"""Models named by hub id: which paths are ids, what is downloaded, what is recorded, and errors; on a local hub."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from megarl.cli.main import main
from megarl.config import RunConfig, ScoreConfig, SftConfig, dump_config, make_score_config
from megarl.controller.resume import recorded_inputs
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.errors import ConfigError
from megarl.model_files.hub import hub_ids, is_hub_id, local_model, with_local_models
from tests.errors import expect_error
from tests.model_files.fake_hub import GATED, FakeHub, hub_of_this_process

FILES = {
    "config.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights",
    "tokenizer.json": b"{   }",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"code",
    "README.md": b"text",
    "consolidated.safetensors": b"weights once more",
    "original/params.json": b"{    }",
}
DOWNLOADED = {"config.json", "model-00001-of-00001.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve a hub with the model org/model, which this process uses, with an empty cache."""
    with hub_of_this_process(monkeypatch, tmp_path / "cache") as served:
        served.commit("org/model", FILES)
        monkeypatch.chdir(tmp_path)
        yield served


def sft(path: str, **model: Any) -> SftConfig:
    tree = {"run_dir": "run", "model": {"path": path, **model}, "data": {"path": "data.jsonl"}}
    return SftConfig.model_validate(tree)


def test_hub_ids_are_organization_and_name():
    ids = ["org/model", "Qwen/Qwen2.5-0.5B", "org/model@main", "org/model@refs/pr/1"]
    others = ["model", "/models/m", "./org/model", "../org/model", "runs/a/model", "org/model/", "a/b@"]
    others.append("a/b/config.json")
    assert [path for path in (*ids, *others) if is_hub_id(path)] == ids


def test_folders_are_no_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    config = sft("org/model")
    assert with_local_models(config) is config
    assert hub_ids(sft("runs/base", tiny={})) == {}, "one that will be written"


def test_weights_and_text_files_are_downloaded_once(hub):
    lines: list[str] = []
    config = with_local_models(sft("org/model"), notify=lines.append)
    folder, commit = Path(config.model.path), hub.branches["org/model", "main"]
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == DOWNLOADED
    assert folder.name == commit
    assert config.model.hub_revisions == {"org/model": commit}
    assert lines == [f"model.path: org/model is commit {commit}, in {folder}"]
    assert sorted(hub.downloaded) == sorted(DOWNLOADED)
    assert with_local_models(sft("org/model")) == config
    assert len(hub.downloaded) == len(DOWNLOADED)


def test_paths_of_all_models_can_be_hub_ids(hub):
    other = hub.commit("org/other", {"config.json": b"{ }"})
    branch = hub.commit("org/model", {"config.json": b"{  }"}, branch="v2")
    algorithm = {"type": "ppo", "critic": {"path": "org/other"}, "reference": {"path": "/local"}}
    reward = {"terms": {"judge": {"type": "model", "path": "org/model@v2"}, "match": {"type": "numeric"}}}
    tree = {"run_dir": "run", "model": {"path": "org/model"}, "data": {"path": "data.jsonl"}}
    local = with_local_models(RunConfig.model_validate({**tree, "algorithm": algorithm, "reward": reward}))
    folders = {auxiliary.key: Path(auxiliary.path).name for auxiliary in local.auxiliary_models}
    assert folders == {"algorithm.critic": other, "algorithm.reference": "local", "reward.terms.judge": branch}
    assert local.model.hub_revisions == {
        "org/model": hub.branches["org/model", "main"],
        "org/other": other,
        "org/model@v2": branch,
    }


def test_resumed_run_keeps_its_commit(hub, tmp_path):
    first = with_local_models(sft("org/model"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "sft.yaml").write_text(dump_config(first))
    assert hub.commit("org/model", {"config.json": b"{ }"}) != first.model.hub_revisions["org/model"]
    recorded = recorded_inputs(sft("org/model"), "auto").models
    assert with_local_models(sft("org/model"), recorded) == first
    assert with_local_models(sft("org/model")) != first
    checkpoint = tmp_path / "elsewhere"
    checkpoint.mkdir()
    (checkpoint / "config.yaml").write_text(dump_config(first))
    another = sft("org/model").model_copy(update={"run_dir": "new"})
    assert recorded_inputs(another, str(checkpoint)).models == first.model.hub_revisions
    assert recorded_inputs(another, "auto").models == {}


def test_commit_of_the_configuration_takes_precedence(hub):
    old = hub.branches["org/model", "main"]
    new = hub.commit("org/model", {"config.json": b"{ }"})
    config = with_local_models(sft("org/model", hub_revisions={"org/model": old}), {"org/model": new})
    assert Path(config.model.path).name == old


def test_score_and_options_take_hub_ids(hub):
    config: ScoreConfig = with_local_models(make_score_config("org/model"))
    assert local_model("org/model", key="--model") == config.model.path
    assert local_model("some/folder/x", key="--model") == "some/folder/x"
    with expect_error(ConfigError, "org/none", "--model", "folder"):
        local_model("org/none", key="--model")


def test_single_file_does_not_count_as_the_model(hub):
    local_model("org/model", key="--model", files=("config.json",))
    assert hub.downloaded == ["config.json"]
    with_local_models(sft("org/model"))
    assert sorted(hub.downloaded) == sorted(DOWNLOADED)


@pytest.mark.parametrize(
    ("hub_id", "cause"),
    [
        ("org/none", "{hub} has no model org/none, or it is private and needs HF_TOKEN or `hf auth login`"),
        ("org/model@none", "{hub}/org/model has no revision none"),
        (GATED, "its license needs to be accepted at {hub}/org/gated by the user of HF_TOKEN or `hf auth login`"),
    ],
)
def test_error_names_key_and_cause(hub, hub_id, cause):
    with pytest.raises(ConfigError) as raised:
        with_local_models(sft(hub_id))
    expected = f"model.path: there is no folder {hub_id}, and the model cannot be loaded from the hub: "
    assert str(raised.value) == expected + cause.format(hub=hub.endpoint)


def test_offline_mode_uses_the_cache_only(hub, monkeypatch):
    online = with_local_models(sft("org/model"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert with_local_models(sft("org/model")) == online
    with expect_error(ConfigError, "model.path", "org/x", "HF_HUB_OFFLINE"):
        with_local_models(sft("org/x"))


def test_unreachable_hub_is_named(hub, monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(ConfigError, match=rf"from the hub: {endpoint} cannot be reached \(.*refused\)$"):
            with_local_models(sft("org/model"))


def test_check_resolves_a_hub_id(hub, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1", "response": "2"}\n')
    write_tiny_model(tmp_path / "tiny", ["1+1", "2"], seed=0)
    config = tmp_path / "sft.yaml"
    config.write_text("run_dir: run\nmodel: {path: org/tiny}\ndata: {path: data.jsonl}\n")
    commit = hub.commit("org/tiny", {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()})
    assert main(["check", str(config), "--stage", "sft"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)["model"]
    assert resolved["hub_revisions"] == {"org/tiny": commit}
    assert resolved["path"] == str(tmp_path / "cache/models--org--tiny/snapshots" / commit)


def test_code_is_downloaded_from_a_pinned_commit_only(hub):
    commit = hub.branches["org/model", "main"]
    for path in ("org/model", "org/model@main", f"org/model@{commit[:12]}"):
        with expect_error(ConfigError, "model.path", "model.trust_remote_code", "40", "org/model@C"):
            with_local_models(sft(path, trust_remote_code=True))
    assert hub.downloaded == []
    pinned = (sft(f"org/model@{commit}", trust_remote_code=True),)
    pinned += (sft("org/model", trust_remote_code=True, hub_revisions={"org/model": commit}),)
    for config in pinned:
        folder = Path(with_local_models(config).model.path)
        assert {file.name for file in folder.iterdir()} == DOWNLOADED | {"modeling_custom.py"}
    resumed = sft("org/model", trust_remote_code=True)
    assert Path(with_local_models(resumed, {"org/model": commit}).model.path).name == commit


def test_every_hub_model_needs_a_commit_for_its_code(hub):
    commit = hub.branches["org/model", "main"]
    hub.commit("org/other", FILES)
    tree = sft(f"org/model@{commit}", trust_remote_code=True).model_dump(exclude_unset=True)
    config = RunConfig.model_validate({**tree, "algorithm": {"kl_loss": {}, "reference": {"path": "org/other"}}})
    with expect_error(ConfigError, "algorithm.reference.path", "model.trust_remote_code"):
        with_local_models(config)
