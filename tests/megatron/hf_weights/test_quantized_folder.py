"""Model folders in FP8, as DeepSeek-V3 is published, compared with the same folders dequantized by plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.placement.rank_grid import RankGrid
from tests.megatron.fidelity.measure import as_trajectory
from tests.megatron.fidelity.models import CONFIGS, append_prediction_layer, build
from tests.megatron.fidelity.reference import SHORT, draw
from tests.megatron.hf_weights.test_export import load_folder
from tests.megatron.hf_weights.test_fp8_sync import empty_parameters
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks
from tests.model_files.quantized import dequantize_folder, quantize_folder

CONFIG = CONFIGS["deepseek_v3"] | {
    "hidden_size": 168,
    "intermediate_size": 300,
    "moe_intermediate_size": 144,
    "n_routed_experts": 8,
    "q_lora_rank": 140,
    "kv_lora_rank": 132,
    "qk_nope_head_dim": 40,
    "v_head_dim": 30,
    "num_hidden_layers": 2,
}
"""No shard of any layout begins where a block does, except the first."""

GRIDS = [
    {"tp": 2},
    {"tp": 6},
    {"pp": 2, "ep": 4, "dp": 4},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "ep": 2, "etp": 2, "dp": 2},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder in FP8, and the dequantized ones by dtype."""
    root = tmp_path_factory.mktemp("fp8")
    build(CONFIG).save_pretrained(root / "plain")
    append_prediction_layer(root / "plain" / "model.safetensors", CONFIG)
    quantized = quantize_folder(root / "plain", root / "fp8")
    return quantized, {
        name: dequantize_folder(quantized, root / name, dtype=getattr(torch, name)) for name in ("bfloat16", "float32")
    }


def read_shards(folder, grid, dtype):
    """Return the local tensors of each rank of `grid`."""
    from megarl.megatron.families.load_architecture import load_architecture_and_dtype
    from megarl.megatron.families.trainer_layouts import trainer_layouts
    from megarl.megatron.hf_weights.local_layout import read_weights

    ranks = []
    for layout in trainer_layouts(load_architecture_and_dtype(folder)[0], RankGrid(**grid), dtype):
        ranks.append(empty_parameters(layout))
        read_weights(folder, layout, ranks[-1])
    return ranks


def compare_shards(quantized, dequantized):
    compared = 0
    for dtype, folder in dequantized.items():
        for grid in GRIDS if dtype == "bfloat16" else GRIDS[:1]:
            pairs = zip(read_shards(quantized, grid, dtype), read_shards(folder, grid, dtype), strict=True)
            for rank, (got, want) in enumerate(pairs):
                for name, tensor in want.items():
                    assert torch.equal(got[name], tensor), (dtype, grid, rank, name)
                compared += len(want)
    return compared


def test_shards_of_every_layout_are_those_of_the_dequantized_folder(folders, tmp_path):
    assert run_ranks(compare_shards, 1, tmp_path, *folders) > 1000


def score_and_export(folders, target):
    """Return the log-probabilities of each folder's model; export that of the first to `target`."""
    from megarl.megatron.hf_weights import export

    trajectories = [as_trajectory(tokens) for tokens in draw(SHORT, CONFIG["vocab_size"])]
    logprobs = []
    for folder in folders:
        model = make_model(model_spec(folder, {"tp": 2, "ep": 2, "etp": 1}, dtype="bfloat16"))
        logprobs.append([scores for scores, _ in model.score([trajectories])[0]])
        if target is not None and folder == folders[0]:
            export.save(model, folder, target)
    gather(None)  # rank 0 returns once all have exported
    return logprobs


def test_logprobs_and_export_are_those_of_the_dequantized_folder(folders, tmp_path):
    quantized, dequantized = folders
    target = tmp_path / "out"
    got, want = run_ranks(score_and_export, 2, tmp_path, (quantized, dequantized["bfloat16"]), str(target))
    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))
    assert torch.cat(got).std() > 0.1
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    exported, expected = load_folder(target), load_folder(Path(dequantized["bfloat16"]))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
