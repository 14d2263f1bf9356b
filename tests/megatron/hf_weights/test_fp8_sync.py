"""Weight sync to FP8 engines, whose layouts are traced from SGLang: bits compared with a folder quantized offline."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.config.weight_sync import WeightSyncConfig
from megarl.megatron.requests import SyncSetup
from megarl.reshard.layout.layout import slices
from tests.megatron.fidelity.models import CONFIGS, build
from tests.megatron.matrix import sample
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks
from tests.model_files.quantized import quantize_folder

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS = {
    # the trainer's tensor-parallel shards of keys and values, and of experts, are parts of blocks
    "qwen3_moe": CONFIGS["qwen3_moe"] | SIZES | {"head_dim": 64, "moe_intermediate_size": 384, "mlp_only_layers": []},
    "deepseek_v3": CONFIGS["deepseek_v3"]
    | SIZES
    | LATENT
    | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_nextn_predict_layers": 0},
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
    from megarl.rollout.sglang.weight_layout.offline_trace import trace_layouts
    from tests.rollout.remote import fork_traces

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
    from megarl.megatron.hf_weights.weight_sync_worker import WeightSyncWorker
    from megarl.reshard.planning.strategy import DeltaUpdate, Sinks
    from megarl.reshard.transfer.sink import Parameters

    config, world = WeightSyncConfig(strategy=strategy, bucket_bytes=200_000), dist.get_world_size()
    needs, groups = dict(enumerate(layouts)), ()
    if strategy == "micro_dp":
        needs, groups = dict.fromkeys(range(world), layouts[0]), (tuple(range(world)),)
    setup = SyncSetup(config=config, needs=needs, groups=groups, nodes=(0,) * world)
    worker, rank = WeightSyncWorker(model, setup), dist.get_rank()
    parameters = empty_parameters(needs[rank]) if rank in needs else None
    with torch.no_grad():
        sinks = Sinks(boxes=None if parameters is None else Parameters(parameters))
        stats = worker.strategy.push(worker._sent_tensors(), sinks, DeltaUpdate(number=1, base=None))
        again = worker.strategy.push(worker._sent_tensors(), sinks, DeltaUpdate(number=2, base=1))
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
    stored = {name: t for file in quantized.glob("*.safetensors") for name, t in load_file(file).items()}
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
