"""FP8 weights: sync to engines, and folders as DeepSeek-V3 is published, against folders quantized by plain loops."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.rollout import WeightSyncConfig
from megarl.megatron.families.load_architecture import find_weight_problems, load_architecture_from_folder
from megarl.megatron.requests import SyncSetup
from megarl.reshard.layout.layout import slices
from tests.megatron.fidelity.measure import as_trajectory
from tests.megatron.fidelity.models import (
    CONFIGS,
    STACKED,
    TWO_DTYPES,
    append_prediction_layer,
    build,
    save_vision_model,
)
from tests.megatron.fidelity.reference import SHORT, draw
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.test_hf_export import load_folder, same_bits
from tests.model_files.quantized import dequantize_folder, quantize_folder

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_nextn_predict_layers": 0}
MODELS = {
    # the trainer's tensor-parallel shards of keys and values, and of experts, are parts of blocks
    "qwen3_moe": CONFIGS["qwen3_moe"] | SIZES | {"head_dim": 64, "moe_intermediate_size": 384, "mlp_only_layers": []},
    "deepseek_v3": CONFIGS["deepseek_v3"] | SIZES | LATENT,
}
ENGINE_TP = {"qwen3_moe": 1, "deepseek_v3": 2}

LAYOUTS = [
    ("qwen3_moe", 2, {"tp": 2}),
    ("qwen3_moe micro_dp", 2, {"tp": 2}),
    ("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2}),
    ("deepseek_v3", 4, {"tp": 4}),
    ("deepseek_v3", 4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Return, by model, its folder, the folder in FP8, and the layouts of an engine of the latter."""
    from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
    from tests.engines.remote import fork_traces

    found = {}
    for name, config in MODELS.items():
        root = tmp_path_factory.mktemp(name)
        build(config).save_pretrained(root / "plain")
        quantized = quantize_folder(root / "plain", root / "fp8")
        with pytest.MonkeyPatch.context() as patch:
            fork_traces(patch)
            layouts = trace_layouts(quantized, tp=ENGINE_TP[name], device="cuda", dtype="bfloat16")
        found[name] = str(root / "plain"), root / "fp8", layouts
    return found


def sync(folder, parallel, layouts, strategy):
    """Sync to an engine on the slots of the first trainer ranks, with micro_dp to one on each slot.

    Returns by trainer rank: the engine's parameters, as bytes, and statistics.
    """
    model = make_model(model_spec(folder, parallel, dtype="bfloat16"))
    from megarl.megatron.weight_sync_worker import WeightSyncWorker
    from megarl.reshard.planning.strategy import DeltaUpdate, Sinks
    from megarl.reshard.transfer.bucket import Parameters

    config, world = WeightSyncConfig(strategy=strategy, bucket_bytes=200_000), dist.get_world_size()
    needs, groups = dict(enumerate(layouts)), ()
    if strategy == "micro_dp":
        needs, groups = dict.fromkeys(range(world), layouts[0]), (tuple(range(world)),)
    setup = SyncSetup(config=config, needs=needs, groups=groups, nodes=(0,) * world)
    worker, rank = WeightSyncWorker(model, setup), dist.get_rank()
    parameters = empty_parameters(needs[rank]) if rank in needs else None
    with torch.no_grad():
        sinks = Sinks(boxes=None if parameters is None else Parameters(parameters))
        stats = worker.strategy.push(worker.sent_tensors(), sinks, DeltaUpdate(number=1, base=None))
        again = worker.strategy.push(worker.sent_tensors(), sinks, DeltaUpdate(number=2, base=1))
    assert again.bytes_delivered == 0, "equal weights have equal values and scales"
    worker.close()
    # FP8 tensors cannot be pickled
    return gather(({name: tensor.view(torch.uint8) for name, tensor in (parameters or {}).items()}, stats))


def empty_parameters(layout):
    shapes, dtypes = {}, {}
    for piece in layout.pieces:
        stops = [stop for _, stop in piece.local_box]
        shapes[piece.local] = [max(pair) for pair in zip(stops, shapes.get(piece.local, stops), strict=True)]
        dtypes[piece.local] = getattr(torch, layout.tensors[piece.tensor].dtype)
    return {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


@pytest.mark.parametrize(("name", "world", "parallel"), sample(LAYOUTS, [LAYOUTS[1], LAYOUTS[2], LAYOUTS[4]]), ids=str)
def test_engine_has_the_bits_of_the_folder_quantized_offline(name, world, parallel, engines, tmp_path):
    name, _, strategy = name.partition(" ")
    folder, quantized, layouts = engines[name]
    results = run_ranks(sync, world, tmp_path, folder, parallel, layouts, strategy or "exact")
    stored = load_folder(quantized)
    delivered = dense = 0
    for layout, (parameters, stats) in zip(layouts, results, strict=False):
        wanted = empty_parameters(layout)
        for piece in layout.pieces:
            wanted[piece.local][slices(piece.local_box)] = stored[piece.tensor][slices(piece.box)]
            if not piece.tensor.endswith("_scale_inv"):
                dense += 2 * wanted[piece.local][slices(piece.local_box)].numel()
        for local, tensor in wanted.items():
            assert torch.equal(parameters[local], tensor.view(torch.uint8)), local
        delivered += stats.bytes_delivered
    assert 0.5 < delivered / dense < 0.56


@pytest.mark.parametrize("name", [TWO_DTYPES, "qwen3_next"])
def test_engine_has_vectors_in_its_own_dtype(name, model_folder, tmp_path, monkeypatch):
    """SGLang's `A_log` is float32, and its norm of a gated delta net has the dtype that config.json states."""
    from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
    from tests.engines.remote import fork_traces

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fork_traces(monkeypatch)
    folder = model_folder(name)
    layouts = trace_layouts(folder, tp=1, device="cuda", dtype="bfloat16")
    (parameters, _), *_ = run_ranks(sync, 2, tmp_path, folder, {"tp": 2}, layouts, "exact")
    kept, stored = name == TWO_DTYPES, load_folder(folder)
    wanted = empty_parameters(layouts[0])
    for piece in layouts[0].pieces:
        tensor = stored[piece.tensor] if kept else stored[piece.tensor].bfloat16()
        wanted[piece.local][slices(piece.local_box)] = tensor[slices(piece.box)].to(wanted[piece.local].dtype)
    for local, tensor in wanted.items():
        assert torch.equal(parameters[local], tensor.view(torch.uint8)), local
    dtypes = {piece.tensor: wanted[piece.local].dtype for piece in layouts[0].pieces}
    attention = "model.layers.0.linear_attn"
    assert dtypes[f"{attention}.A_log"] == torch.float32
    assert dtypes[f"{attention}.dt_bias"] == torch.bfloat16
    assert dtypes[f"{attention}.norm.weight"] == (torch.bfloat16 if kept else torch.float32)


UNEVEN = {"hidden_size": 168, "intermediate_size": 300, "moe_intermediate_size": 144, "num_hidden_layers": 2}
CONFIG = CONFIGS["deepseek_v3"] | UNEVEN
CONFIG |= {"q_lora_rank": 140, "kv_lora_rank": 132, "qk_nope_head_dim": 40, "v_head_dim": 30}
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
    from megarl.megatron.local_layout import read_weights

    ranks = []
    for layout in trainer_layouts(load_architecture_and_dtype(folder)[0], RankGrid(**grid), dtype):
        ranks.append(empty_parameters(layout))
        read_weights(folder, layout, ranks[-1])
    return ranks


def compare_shards(quantized, dequantized, grids=GRIDS):
    compared = 0
    for dtype, folder in dequantized.items():
        for grid in grids if dtype == "bfloat16" else grids[:1]:
            pairs = zip(read_shards(quantized, grid, dtype), read_shards(folder, grid, dtype), strict=True)
            for rank, (got, want) in enumerate(pairs):
                for name, tensor in want.items():
                    assert torch.equal(got[name], tensor), (dtype, grid, rank, name)
                compared += len(want)
    return compared


def test_shards_of_every_layout_are_those_of_the_dequantized_folder(folders, tmp_path):
    assert run_ranks(compare_shards, 1, tmp_path, *folders) > 1000


def add_prediction_tensors(folder):
    """Add two tensors of Qwen3.5's prediction layer, of which megarl has no description; all vectors in bfloat16."""
    file = folder / "model.safetensors"
    tensors = {name: t.bfloat16() if t.ndim == 1 else t for name, t in load_file(file).items()}
    generator = torch.Generator().manual_seed(1)
    added = {"mtp.layers.0.self_attn.q_proj.weight": torch.randn(150, 48, generator=generator)}
    added["mtp.norm.weight"] = torch.randn(48, generator=generator)
    save_file(tensors | added, file, metadata={"format": "pt"})


def read_and_export(quantized, dequantized, target):
    from megarl.megatron import hf_export

    hf_export.save(make_model(model_spec(quantized, dtype="bfloat16")), quantized, target)
    return compare_shards(quantized, {"bfloat16": dequantized}, GRIDS[:1] + GRIDS[3:])


def test_folder_with_a_tower_and_experts_one_by_one_is_read_and_exported(tmp_path):
    """As Qwen3.5 is published in FP8; in bfloat16 its experts are stacked."""
    plain, _ = save_vision_model("qwen3_5_moe", tmp_path)
    add_prediction_tensors(Path(plain))
    quantized = quantize_folder(plain, tmp_path / "fp8")
    stored = load_folder(quantized)
    assert any(name.endswith("in_proj_qkv.weight_scale_inv") for name in stored)
    assert "mtp.layers.0.self_attn.q_proj.weight_scale_inv" in stored
    dequantized = dequantize_folder(quantized, tmp_path / "plain", dtype=torch.bfloat16)
    assert run_ranks(read_and_export, 1, tmp_path, quantized, dequantized, str(tmp_path / "out")) > 500
    same_bits(tmp_path / "out", dequantized)


def test_stacked_experts_in_fp8_are_refused(tmp_path):
    folder = Path(save_vision_model(STACKED, tmp_path)[1])
    name, tensors = "model.layers.0.mlp.experts.down_proj", load_folder(folder)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    problems = find_weight_problems(folder, load_architecture_from_folder(folder))
    assert problems == [
        f"{folder / 'model.safetensors'}: {name} is float8_e4m3fn and needs 2 dimensions, got shape [8, 48, 24]"
    ]


def score_and_export(folders, target):
    """Return the log-probabilities of each folder's model; export that of the first to `target`."""
    from megarl.megatron import hf_export

    trajectories = [as_trajectory(tokens) for tokens in draw(SHORT, CONFIG["vocab_size"])]
    logprobs = []
    for folder in folders:
        model = make_model(model_spec(folder, {"tp": 2, "ep": 2, "etp": 1}, dtype="bfloat16"))
        logprobs.append([scores for scores, _ in model.score([trajectories])[0]])
        if target is not None and folder == folders[0]:
            hf_export.save(model, folder, target)
    gather(None)  # rank 0 returns once all have exported
    return logprobs


def test_logprobs_and_export_are_those_of_the_dequantized_folder(folders, tmp_path):
    (quantized, dequantized), target = folders, tmp_path / "out"
    got, want = run_ranks(score_and_export, 2, tmp_path, (quantized, dequantized["bfloat16"]), str(target))
    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))
    assert torch.cat(got).std() > 0.1
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    same_bits(target, dequantized["bfloat16"])
