"""What config.json states about quantized weights: formats that are read, and refusals by key and value."""

import json
from pathlib import Path

import pytest

from megarl.model_files.quantization import find_config_problem, is_quantized, quantized_format
from tests.model_files.quantized import INT4, QUANTIZATION

PUBLISHED = Path(__file__).parents[1] / "megatron/families/published"


def changed(**weights):
    group = INT4["config_groups"]["group_0"]
    return INT4 | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (QUANTIZATION | {"weight_block_size": [1, 32]}, "weight_block_size needs [128, 128], got [1, 32]"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size needs [128, 128], got None"),
        (QUANTIZATION | {"fmt": "e5m2"}, "quantization_config.fmt needs e4m3, got e5m2"),
        ("fp8", "quantization_config.quant_method needs fp8 or mxfp4 or compressed-tensors, got None"),
        ({"quant_method": "awq"}, "quantization_config.quant_method needs fp8 or mxfp4 or compressed-tensors, got awq"),
        (changed(num_bits=8), "config_groups.group_0.weights.num_bits needs 4, got 8"),
        (changed(group_size=128), "config_groups.group_0.weights.group_size needs 32, got 128"),
        (changed(symmetric=False), "config_groups.group_0.weights.symmetric needs True, got False"),
        (changed(strategy="channel"), "config_groups.group_0.weights.strategy needs group, got channel"),
        (changed(type="float"), "config_groups.group_0.weights.type needs int, got float"),
        (changed(actorder="group"), "config_groups.group_0.weights.actorder needs None, got group"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "format needs pack-quantized, got nvfp4-pack-quantized"),
        (INT4 | {"config_groups": {}}, "config_groups needs a group of weights, got {}"),
        (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config needs None, got"),
    ],
)
def test_other_quantizations_are_refused_by_key_and_value(stated, message):
    assert message in find_config_problem({"quantization_config": stated})


@pytest.mark.parametrize(("name", "kind"), [("gpt-oss-20b", "MXFP4"), ("Kimi-K2.5", "INT4"), ("DeepSeek-V3", "FP8")])
def test_published_formats_are_read(name, kind):
    config = json.loads((PUBLISHED / f"{name}.json").read_text())
    config = config.get("text_config", config)
    assert (find_config_problem(config), quantized_format(config)) == (None, kind)


def test_fp8_is_read_under_each_name_of_its_values():
    without_format = {key: value for key, value in QUANTIZATION.items() if key != "fmt"}
    as_dtype, unquantized_head = {"fmt": "float8_e4m3fn"}, {"modules_to_not_convert": ["lm_head"]}
    for stated in (None, QUANTIZATION, without_format, QUANTIZATION | as_dtype, QUANTIZATION | unquantized_head):
        assert find_config_problem({"quantization_config": stated}) is None


def test_engine_holds_weights_in_fp8_only_of_a_folder_in_fp8():
    names = ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight")
    for stated, expected in ((QUANTIZATION, True), (INT4, False), ({"quant_method": "mxfp4"}, False), (None, False)):
        assert {is_quantized(name, {"quantization_config": stated}) for name in names} == {expected}
