"""Distribution of layers over pipeline stages, compared with megatron-core's."""

from __future__ import annotations

import pytest

from megarl.errors import ConfigError
from megarl.megatron.families.pipeline_stages import PipelineSplit, stage_layers

SPLITS = [
    (8, 1, PipelineSplit()),
    (8, 4, PipelineSplit()),
    (8, 2, PipelineSplit(num_chunks=2)),
    (12, 3, PipelineSplit(num_chunks=4)),
    (61, 16, PipelineSplit(last=1)),
    (61, 16, PipelineSplit(first=3, last=2)),
    (7, 3, PipelineSplit(first=3)),
    (5, 2, PipelineSplit(first=3, last=2)),
    (10, 4, PipelineSplit(first=2, last=4, num_chunks=2)),
    (14, 4, PipelineSplit(last=2, num_chunks=2)),
]


@pytest.mark.parametrize(("layers", "pp", "split"), SPLITS, ids=str)
def test_stages_match_megatron_core(layers: int, pp: int, split: PipelineSplit) -> None:
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=split.num_chunks if split.num_chunks > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        pipeline_dtype=torch.float32,
    )
    stages = stage_layers(layers, pp, split)
    assert [len(chunks) for chunks in stages] == [split.num_chunks] * pp
    for stage, chunks in enumerate(stages):
        for chunk, here in enumerate(chunks):
            vp_stage = chunk if split.num_chunks > 1 else None
            start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
            assert here == range(start, start + count), (stage, chunk)
    assert sorted(i for chunks in stages for here in chunks for i in here) == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "pp", "split", "message"),
    [
        (61, 16, PipelineSplit(), r"pp needs to divide the layers, got 61 % 16 = 13"),
        (61, 16, PipelineSplit(last=2), r"pp needs to divide the layers, got \(61 - 2\) % 15 = 14"),
        (5, 2, PipelineSplit(first=3, last=3), r"the stages need to hold 5 layers, got 3 \+ 3"),
        (8, 4, PipelineSplit(first=0), r"a stage needs at least 1 layer, got 0"),
        (4, 3, PipelineSplit(first=5), r"pp needs to divide the layers, got \(4 - 5\) % 2 = 1"),
        (8, 1, PipelineSplit(last=4), r"need pp > 1, got pp 1"),
        (8, 1, PipelineSplit(num_chunks=2), r"vpp needs pp > 1, got vpp 2 with pp 1"),
        (8, 2, PipelineSplit(num_chunks=3), r"vpp needs to divide the layers of every stage, got 4 % 3 = 1 on stage 0"),
    ],
    ids=str,
)
def test_impossible_splits_raise(layers: int, pp: int, split: PipelineSplit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_layers(layers, pp, split)
