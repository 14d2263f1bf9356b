"""Value models loaded from config.json: their tensors, options, and which ranks hold the value head."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.load_architecture import FAMILY_READERS, load_architecture
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.rank_grid import RankGrid
from tests.megatron.families.tiny import CONFIGS, tiny

ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def classifier(name: str) -> dict[str, Any]:
    """The config.json that transformers writes for a value model."""
    architecture = CONFIGS[name]["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    return CONFIGS[name] | ONE_LABEL | {"architectures": [architecture]}


@pytest.mark.parametrize("name", CONFIGS)
def test_value_model_has_score_tensor_instead_of_lm_head(name: str) -> None:
    lm = tiny(name)
    lm_tensors = lm.tensors("bfloat16")
    mtp_prefixes = tuple(f"model.layers.{lm.num_layers + i}." for i in range(lm.num_mtp_layers))
    trunk = {n: spec for n, spec in lm_tensors.items() if n != "lm_head.weight" and not n.startswith(mtp_prefixes)}
    for config in (classifier(name), CONFIGS[name]):
        value = load_architecture(config, origin="test", head="value")
        tensors = dict(value.tensors("bfloat16"))
        assert (tensors.pop("score.weight").shape, tensors) == ((1, lm.hidden_size), trunk)
        assert value.name == classifier(name)["architectures"][0]
        assert (value.head, value.tie_embeddings, value.duplicated_tensors()) == ("value", False, {})


@pytest.mark.parametrize("architecture", FAMILY_READERS)
def test_transformers_has_every_architecture(architecture: str) -> None:
    import transformers

    assert hasattr(transformers, architecture.replace("ForCausalLM", "ForSequenceClassification"))


def test_head_defaults_to_that_of_the_architecture() -> None:
    assert load_architecture(classifier("qwen3_moe"), origin="test", head=None).head == "value"
    assert load_architecture(CONFIGS["qwen3_moe"], origin="test", head=None) == tiny("qwen3_moe")


def test_score_tensor_is_optional_only_for_a_language_model_folder() -> None:
    value = load_architecture(CONFIGS["deepseek_v3"], origin="test", head="value")
    assert value.optional_tensors == ("score.weight",)
    assert value.ignored_patterns == (f"model.layers.{value.num_layers}.*", "lm_head.weight")
    value = load_architecture(classifier("deepseek_v3"), origin="test", head="value")
    assert value.optional_tensors == ()
    assert value.ignored_patterns == (f"model.layers.{value.num_layers}.*",)


def test_value_model_is_rejected_where_logits_are_needed() -> None:
    message = "test: Qwen3MoeForSequenceClassification has a value head and no logits; a language model is needed,"
    with pytest.raises(ConfigError, match=message):
        load_architecture(classifier("qwen3_moe"), origin="test")


@pytest.mark.parametrize(
    ("labels", "got"), [({"id2label": {"0": "no", "1": "yes"}}, 2), ({"num_labels": 3}, 3), ({}, 2)], ids=str
)
def test_classifier_with_several_labels_is_rejected(labels: dict[str, Any], got: int) -> None:
    config = {key: value for key, value in classifier("qwen3_moe").items() if key not in ONE_LABEL} | labels
    with pytest.raises(ConfigError, match=f"needs 1 label to be a value model, got {got}"):
        load_architecture(config, origin="test", head="value")


def test_classifier_of_unknown_family_is_rejected() -> None:
    config = {"architectures": ["GPT2ForSequenceClassification"]} | ONE_LABEL
    with pytest.raises(
        ConfigError, match="architecture GPT2ForSequenceClassification is not supported; supported are "
    ):
        load_architecture(config, origin="test", head="value")


def test_every_tensor_rank_of_the_last_stage_holds_the_value_head() -> None:
    model = load_architecture(CONFIGS["deepseek_v3"], origin="test", head="value")
    grid = RankGrid(tp=2, dp=2, pp=2, ep=2)
    boxes = Counter()
    for rank, layout in enumerate(trainer_layouts(model, grid, "float32")):
        held = [piece for piece in layout.pieces if piece.tensor == "score.weight"]
        assert [piece.local for piece in held] == ["output_layer.weight"] * (grid.coordinates(rank).pp == 1)
        boxes.update(piece.box for piece in held)
    assert boxes == {((0, 1), (0, model.hidden_size)): 4}


def test_value_head_costs_less_than_lm_head() -> None:
    lm, value = tiny("qwen3_moe"), load_architecture(CONFIGS["qwen3_moe"], origin="test", head="value")
    saved = sequence_cost(lm).matmul_parameters - sequence_cost(value).matmul_parameters
    assert saved == lm.hidden_size * (lm.vocab_size - 1)
