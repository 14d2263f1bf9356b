"""Value models as their config.json describes them: what they have, and who holds it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.load_architecture import READERS, read_family
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.rank_grid import RankGrid
from tests.megatron.families.tiny import CONFIGS, tiny

ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def classifier(name: str) -> dict[str, Any]:
    """What transformers writes of a value model."""
    architecture = CONFIGS[name]["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    return CONFIGS[name] | ONE_LABEL | {"architectures": [architecture]}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_value_model_has_a_score_in_place_of_logits(name: str) -> None:
    lm = tiny(name)
    of_lm = lm.tensors("bfloat16")
    further = tuple(f"model.layers.{lm.num_layers + i}." for i in range(lm.num_mtp_layers))
    trunk = {n: spec for n, spec in of_lm.items() if n != "lm_head.weight" and not n.startswith(further)}
    for config in (classifier(name), CONFIGS[name]):
        value = read_family(config, origin="test", head="value")
        tensors = value.tensors("bfloat16")
        assert (tensors.pop("score.weight").shape, tensors) == ((1, lm.hidden_size), trunk)
        assert value.architecture == classifier(name)["architectures"][0]
        assert (value.head, value.tie_embeddings, value.copies()) == ("value", False, {})


@pytest.mark.parametrize("architecture", READERS)
def test_transformers_has_every_architecture(architecture: str) -> None:
    import transformers

    assert hasattr(transformers, architecture.replace("ForCausalLM", "ForSequenceClassification"))


def test_the_head_is_what_the_architecture_says_where_nothing_is_asked() -> None:
    assert read_family(classifier("qwen3_moe"), origin="test", head=None).head == "value"
    assert read_family(CONFIGS["qwen3_moe"], origin="test", head=None) == tiny("qwen3_moe")


def test_only_what_starts_from_a_language_model_may_lack_its_score() -> None:
    value = read_family(CONFIGS["deepseek_v3"], origin="test", head="value")
    assert value.absent == ("score.weight",)
    assert value.unused == (f"model.layers.{value.num_layers}.*", "lm_head.weight")
    value = read_family(classifier("deepseek_v3"), origin="test", head="value")
    assert value.absent == ()
    assert value.unused == (f"model.layers.{value.num_layers}.*",)


def test_a_value_model_has_no_logits() -> None:
    message = "test: Qwen3MoeForSequenceClassification has one value a token and no logits, needed is a language model,"
    with pytest.raises(ConfigError, match=message):
        read_family(classifier("qwen3_moe"), origin="test")


@pytest.mark.parametrize(
    ("labels", "got"), [({"id2label": {"0": "no", "1": "yes"}}, 2), ({"num_labels": 3}, 3), ({}, 2)], ids=str
)
def test_a_classifier_of_several_labels_is_no_value_model(labels: dict[str, Any], got: int) -> None:
    config = {key: value for key, value in classifier("qwen3_moe").items() if key not in ONE_LABEL} | labels
    with pytest.raises(ConfigError, match=f"needs 1 label to be a value model, got {got}"):
        read_family(config, origin="test", head="value")


def test_classifiers_of_unknown_families_are_refused() -> None:
    config = {"architectures": ["GPT2ForSequenceClassification"]} | ONE_LABEL
    with pytest.raises(
        ConfigError, match="architecture GPT2ForSequenceClassification is not supported; supported are "
    ):
        read_family(config, origin="test", head="value")


def test_every_tensor_rank_of_the_last_stage_holds_the_head() -> None:
    model = read_family(CONFIGS["deepseek_v3"], origin="test", head="value")
    grid = RankGrid(tp=2, dp=2, pp=2, ep=2)
    boxes = Counter()
    for rank, layout in enumerate(trainer_layouts(model, grid, "float32")):
        held = [piece for piece in layout.pieces if piece.tensor == "score.weight"]
        assert [piece.local for piece in held] == ["output_layer.weight"] * (grid.coordinates(rank).pp == 1)
        boxes.update(piece.box for piece in held)
    assert boxes == {((0, 1), (0, model.hidden_size)): 4}


def test_a_value_costs_less_than_logits() -> None:
    lm, value = tiny("qwen3_moe"), read_family(CONFIGS["qwen3_moe"], origin="test", head="value")
    saved = sequence_cost(lm).matmul_parameters - sequence_cost(value).matmul_parameters
    assert saved == lm.hidden_size * (lm.vocab_size - 1)
