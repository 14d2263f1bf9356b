"""The pieces of single parameters; test_trainer_layouts.py and the tests of fidelity have those of whole models."""

from __future__ import annotations

import pytest

from megarl.megatron.families.parameter_map import shard_pieces
from tests.megatron.families.tiny import tiny

MODEL = tiny("qwen3_moe")
NAME = "output_layer.weight"


def test_rank_that_holds_only_padding_has_no_pieces() -> None:
    rows = 128  # 331 rows on 4 ranks of 128: the last one holds nothing but padding
    counts = [list(shard_pieces(NAME, MODEL.parameter_map(NAME), (rows, 48), rank=rank, size=4)) for rank in range(4)]
    assert [len(c) for c in counts] == [1, 1, 1, 0]
    assert counts[2][0].box[0] == (256, 331)
    assert counts[2][0].local_box[0] == (0, 75)


def test_fused_norms_map_to_the_same_tensors_as_separate_norms() -> None:
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        assert MODEL.parameter_map(f"decoder.layers.1.{fused}") == MODEL.parameter_map(f"decoder.layers.1.{plain}")


def test_shards_too_small_for_the_tensor_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="331 rows do not fit 2 shards of 165"):
        list(shard_pieces(NAME, MODEL.parameter_map(NAME), (165, 48), rank=0, size=2))
