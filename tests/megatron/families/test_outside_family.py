"""A model family outside the package: read, checked, trained and exported like the Llama that its weights are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli.tools.model_conversion import plan_import
from megarl.cli.tools.token_scoring import open_tokens
from megarl.config import make_convert_config, make_score_config
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import load_family
from megarl.megatron.families.load_architecture import (
    find_weight_problems,
    load_architecture,
    load_architecture_and_dtype,
    load_architecture_from_folder,
    require_family,
)
from tests.errors import expect_error
from tests.megatron.families.outside import MISTRAL_PATH, STORY_PATH, story_name, write_story
from tests.megatron.families.tiny import PLAIN
from tests.megatron.rank_models import assert_same_bits, make_trainer, model_spec, train_step, trainer_spec
from tests.megatron.ranks import run_ranks
from tests.megatron.training.test_trainer import ALL_INDICES, make_request


@pytest.fixture(scope="module")
def llama(model_folder: Any) -> Path:
    return Path(model_folder("llama3"))


@pytest.fixture(scope="module")
def story(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_story(llama, tmp_path_factory.mktemp("outside") / "story")


def test_its_tensors_are_those_of_the_folder(llama: Path, story: Path) -> None:
    model = load_architecture_from_folder(story, family=STORY_PATH)
    assert find_weight_problems(story, model) == []
    tensors, plain = model.tensors("float32"), load_architecture_from_folder(llama).tensors("float32")
    assert tensors == {story_name(name): spec for name, spec in plain.items()}
    assert {name: model.parameter_map(name) for name in model.parameter_maps()} == model.parameter_maps()
    assert "story.h.0.attn.q_proj.weight has query heads" in {unit.description for unit in model.sharding_units()}


def test_value_models_and_other_families_are_read_too(llama: Path, story: Path) -> None:
    value = load_architecture_from_folder(story, head="value", family=STORY_PATH)
    assert value.name == "StoryForSequenceClassification"
    assert find_weight_problems(story, value) == []
    other, _ = load_architecture_and_dtype(str(llama), family=STORY_PATH)  # e.g. a reward model in the same run
    assert other.name == "LlamaForCausalLM"


def test_it_is_read_in_place_of_a_family_of_the_package(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.megatron.families import outside

    own = outside.ModelFamily(architecture="LlamaForCausalLM", read=outside.read_story)
    monkeypatch.setattr(outside, "STORY", own)
    config = json.loads((llama / "config.json").read_text())
    assert load_architecture(config, origin="test", family=STORY_PATH).hf_renames == outside.RENAMES


def test_it_is_read_in_place_of_the_language_model_of_a_folder_with_a_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.megatron.families import outside

    name = "Qwen3_5ForConditionalGeneration"
    own = outside.ModelFamily(architecture=name, read=outside.read_story)
    monkeypatch.setattr(outside, "STORY", own)
    config = {"architectures": [name], "text_config": PLAIN, "vision_config": {}}
    model = load_architecture(config, origin="test", family=STORY_PATH)
    assert (model.hf_renames, model.hidden_size) == (outside.RENAMES, PLAIN["hidden_size"])
    with expect_error(ConfigError, "value model", "folder", "language model"):
        load_architecture(config, origin="test", family=STORY_PATH, head="value")


def test_an_unknown_architecture_is_reported_with_the_option(story: Path) -> None:
    with expect_error(ConfigError, "StoryForCausalLM", "no key", "model.family"):
        load_architecture_from_folder(story)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_families", r"model.family needs package.module:FAMILY, got 'my_families'"),
        ("my_families:X", r"model.family: cannot import my_families: No module named 'my_families'"),
        (f"{__name__}:MISSING", rf"model.family: module {__name__} \(.*\) has no 'MISSING'"),
        (f"{__name__}:STORY_PATH", r"model.family needs a ModelFamily \(.*\), got .*:STORY_PATH, a str"),
    ],
)
def test_a_wrong_import_path_is_reported(path: str, message: str, story: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_family(path)
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_architecture_from_folder(story, family=path)


def test_a_family_of_another_architecture_is_reported(llama: Path, story: Path) -> None:
    require_family(str(story), STORY_PATH)
    require_family(str(llama), None)
    facts = ("--family: ", STORY_PATH, "StoryForCausalLM", "LlamaForCausalLM", f"{llama}/config.json")
    with expect_error(ConfigError, *facts):
        require_family(str(llama), STORY_PATH, key="--family")


def test_offline_tools_pass_it_on(story: Path, llama: Path, tmp_path: Path) -> None:
    conversion = plan_import(make_convert_config(), story, tmp_path / "out", "auto", family=STORY_PATH)
    assert (conversion.family, conversion.dtype) == (STORY_PATH, "float32")
    with expect_error(ConfigError, "MistralForCausalLM", "StoryForCausalLM"):
        plan_import(make_convert_config(), story, tmp_path / "out", "auto", family=MISTRAL_PATH)
    config = make_score_config(str(story), family=STORY_PATH)
    assert open_tokens(config, tmp_path / "tokens.jsonl", str).vocab_size == 509
    with expect_error(ConfigError, "model.family", "StoryForCausalLM", "LlamaForCausalLM"):
        open_tokens(make_score_config(str(llama), family=STORY_PATH), tmp_path / "tokens.jsonl", str)


def train_and_export(path: str, family: str | None, target: str) -> tuple[float, list[str]]:
    """Export the untrained model and that after one step to `target`; return the loss and the layout's tensors."""
    trainer = make_trainer(trainer_spec(model_spec(path, family=family), lr=1e-3))
    from megarl.megatron import hf_export

    hf_export.save(trainer.model, path, f"{target}/before")
    metrics = train_step(trainer, make_request(ALL_INDICES))
    hf_export.save(trainer.model, path, f"{target}/after")
    return metrics["loss"], sorted(trainer.model.layout.tensors)


def test_it_trains_and_exports_under_its_own_names(llama: Path, story: Path, tmp_path: Path) -> None:
    loss, names = run_ranks(train_and_export, 1, tmp_path, str(story), STORY_PATH, str(tmp_path / "story"))
    plain_loss, plain_names = run_ranks(train_and_export, 1, tmp_path, str(llama), None, str(tmp_path / "llama"))
    assert loss == plain_loss
    assert names == sorted(map(story_name, plain_names))

    disk, before, after, plain = (
        load_file(folder / "model.safetensors")
        for folder in (story, *(tmp_path / name for name in ("story/before", "story/after", "llama/after")))
    )
    assert_same_bits(before, disk)
    assert_same_bits(after, {story_name(name): tensor for name, tensor in plain.items()})
    assert not any(torch.equal(after[name], tensor) for name, tensor in disk.items())
    config = json.loads((tmp_path / "story/after/config.json").read_text())
    assert config["architectures"] == ["StoryForCausalLM"]
