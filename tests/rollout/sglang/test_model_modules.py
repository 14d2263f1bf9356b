"""SGLang imports the file of the model that an engine loads, and skips those of the others."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from megarl.rollout.sglang.model_modules import FALLBACK, VARIABLE, find_other_models, skip_other_models

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "Gemma2ForCausalLM": "gemma2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}
"""Architecture in config.json of each family -> file of SGLang that defines its class."""


def models_folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SGLang's sources")
    return Path(spec.submodule_search_locations[0]) / "srt/models"


@pytest.mark.parametrize(("architecture", "file"), ARCHITECTURES.items())
def test_the_file_of_each_family_is_imported(architecture: str, file: str) -> None:
    folder = models_folder()
    skipped = find_other_models(folder, [architecture])
    assert {path.stem for path in folder.glob("*.py")} - set(skipped) == {file, FALLBACK}


def test_nothing_is_skipped_for_an_unknown_model(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class One: ...\n")
    (tmp_path / "two.py").write_text("class OneMore: ...\nclass Two(One): ...\n")
    assert find_other_models(tmp_path, ["One"]) == ["two"]
    assert find_other_models(tmp_path, ["One", "Two"]) == []
    assert find_other_models(tmp_path, ["Three"]) == find_other_models(tmp_path, []) == []


def test_a_choice_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setenv(VARIABLE, "grok")
    skip_other_models(str(tmp_path))
    assert os.environ[VARIABLE] == "grok"
    monkeypatch.delenv(VARIABLE)
    skip_other_models(str(tmp_path))
    assert "llama" not in os.environ[VARIABLE].split(",")
    assert "grok" in os.environ[VARIABLE].split(",")
