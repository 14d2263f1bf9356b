"""Planned bytes of GPUs: activations, engines, what a configuration needs on each GPU, and peaks of phases."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from benchmarks.reshard.published import DEEPSEEK_V3, QWEN3_8B, engine_layouts
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.megatron import MegatronConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.run import DpoConfig, RunConfig, SftConfig
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import EVEN
from megarl.model_files.quantization import is_quantized
from megarl.reshard.layout.quantized_layout import quantize_specs
from megarl.run.memory.activations import (
    TokenLoad,
    chunks_in_flight,
    head_bytes,
    layer_activations,
    stage_activations,
)
from megarl.run.memory.engine_memory import (
    EngineSizes,
    default_mem_fraction,
    engine_bytes,
    engine_weights,
    kv_bytes_per_token,
)
from megarl.run.memory.gpu_demand import gpu_demands, longest_sequence
from megarl.run.memory.gpus import NCCL_BYTES_PER_GROUP, gpu_memory
from megarl.run.memory.step_ledger import DeviceLedger, step_ledger
from megarl.run.memory.training_memory import ElementBytes, library_caches
from megarl_kernels import linear_logprob
from tests.errors import expect_error

QWEN3, DEEPSEEK = (load_architecture(config, origin="config.json") for config in (QWEN3_8B, DEEPSEEK_V3))
H100 = gpu_memory("h100-80")
SIZES = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 12}
GPT = load_architecture(QWEN3_8B | SIZES | {"head_dim": 128}, origin="config.json")
"""All heads together are as wide as the hidden size, and the gated MLP is 8/3 of it: it stores as much as the paper's
MLP without gate, of 4 times the hidden size."""
LOAD = TokenLoad(tokens=1000, element_bytes=2)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_stores_what_the_paper_counts(tp):
    """arXiv 2205.05198, equation 4 with fused attention: 34 sbh / t; less 2 for dropout masks, and 4 more for RoPE."""
    parts = layer_activations(GPT, 0, ParallelConfig(tp=tp), LOAD)
    without_softmax = sum(parts.values()) - parts["core_attn"]
    assert without_softmax == (34 - 2 + 4) * 1000 * GPT.hidden_size // tp


def test_without_sequence_parallelism_norms_are_replicated():
    """The paper's table 2: 10 of the 34 are not divided by t, two of them for dropout masks."""
    whole, split = (
        layer_activations(GPT, 0, ParallelConfig(tp=4, sequence_parallel=sequence), LOAD) for sequence in (False, True)
    )
    replicated = sum(whole.values()) - sum(split.values())
    assert replicated == (10 - 2) * 1000 * GPT.hidden_size * 3 // 4


def test_full_recomputation_keeps_the_input_of_each_layer():
    """The paper: 2 sbh per layer, and one layer while it is recomputed."""
    everything = sum(layer_activations(GPT, 0, ParallelConfig(), LOAD).values())
    (full,) = stage_activations(GPT, ParallelConfig(), RecomputeConfig(granularity="full"), LOAD)
    assert full.stored == 36 * 2 * 1000 * GPT.hidden_size
    assert full.recomputed == everything
    (blocks,) = stage_activations(GPT, ParallelConfig(), RecomputeConfig(granularity="full", layers=4), LOAD)
    assert (blocks.stored, blocks.recomputed) == (full.stored // 4, 4 * everything)
    part = RecomputeConfig(granularity="full", method="block", layers=30)
    (block,) = stage_activations(GPT, ParallelConfig(), part, LOAD)
    assert (block.stored, block.recomputed) == (full.stored // 36 * 30 + 6 * everything, everything)


def test_selective_recomputation_drops_its_modules():
    (none,) = stage_activations(GPT, ParallelConfig(), RecomputeConfig(), LOAD)
    parts = layer_activations(GPT, 0, ParallelConfig(), LOAD)
    some = RecomputeConfig(granularity="selective", modules=("mlp", "layernorm"))
    (selective,) = stage_activations(GPT, ParallelConfig(), some, LOAD)
    dropped = parts["mlp"] + parts["layernorm"]
    assert (selective.stored, selective.recomputed) == (none.stored - 36 * dropped, dropped)


def test_recomputation_of_experts_includes_shared_experts():
    none, moe = (
        stage_activations(DEEPSEEK, ParallelConfig(), recompute, LOAD)[0].stored
        for recompute in (RecomputeConfig(), RecomputeConfig(granularity="selective", modules=("moe",)))
    )
    parts = layer_activations(DEEPSEEK, 3, ParallelConfig(), LOAD)
    assert none - moe == 58 * (parts["moe"] + parts["moe_act"] + parts["shared_experts"])


def test_micro_batches_in_flight():
    assert [chunks_in_flight(ParallelConfig(pp=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    for pp, vpp in ((4, 2), (2, 3)):
        # the paper, section 4.2.3: interleaved, the first stage stores 1 + (p - 1) / (p m) times as much
        factor = 1 + (pp - 1) / (pp * vpp)
        assert chunks_in_flight(ParallelConfig(pp=pp, vpp=vpp), 0) == pytest.approx(pp * vpp * factor)


def test_the_head_is_on_the_last_stage():
    first, last = stage_activations(GPT, ParallelConfig(pp=2), RecomputeConfig(), LOAD, head_kind="float32")
    assert first.head == 0
    t, v, h = 1000, 151936, 1536
    norms = 2 * 2 * t * h
    assert last.head == norms + 4 * t * v + 2 * 4 * (t + v) * h
    assert last.forward == norms + 4 * t * v + 4 * (t + v) * h > first.forward
    assert first.stored == 2 * last.stored
    value = GPT.with_value_head(from_lm=True)
    assert head_bytes(value, 1, LOAD, "fused", trains=True) == norms
    (scorer,) = stage_activations(value, ParallelConfig(), RecomputeConfig(), LOAD)
    assert scorer.forward == first.forward


@pytest.mark.parametrize(("tokens", "tp"), [(100, 1), (4096, 1), (8192, 1), (8192, 8), (65_536, 1)])
def test_a_fused_head_has_the_chunks_of_its_op(tokens, tp):
    load, h, columns = TokenLoad(tokens=tokens, element_bytes=2), GPT.hidden_size, 151936 // tp
    c = min(columns, linear_logprob.chunk_columns(tokens, columns, 6))
    assert head_bytes(GPT, tp, load, "fused", trains=False) == 4 * tokens * h + 4 * tokens * c
    assert head_bytes(GPT, tp, load, "fused", trains=True) == 4 * tokens * h + 6 * tokens * (c + h)


def test_caches_of_libraries():
    """Qwen3-8B has four shapes of linear layers, and a head that is not tied."""
    h, f, qkv = 4096, 12288, 4096 + 2 * 1024
    layer = h * (qkv + h + 3 * f)
    fp8 = ElementBytes.of("bfloat16", MegatronConfig(model={"fp8": "hybrid", "fp8_recipe": "blockwise"}))

    def of(element=fp8, model=QWEN3, **options):
        options = {"grid": RankGrid(), "head_kind": "fused", "is_trained": True} | options
        return library_caches(model, options.pop("grid"), EVEN, element, **options)

    (trained,) = of()
    assert trained.quantized == 2 * 36 * layer  # for products with the weight, and with its transpose
    assert trained.dummy_gradients == 2 * (layer + 151936 * h)
    (frozen,) = of(is_trained=False)
    assert (frozen.quantized, frozen.dummy_gradients) == (36 * layer, 0)
    assert of(ElementBytes.of("bfloat16"))[0].quantized == 0
    first, last = of(grid=RankGrid(pp=2, tp=2))
    assert first.quantized == last.quantized == 2 * 18 * layer // 2
    assert (first.dummy_gradients, last.dummy_gradients) == (layer, layer + 151936 * h)
    assert of(head_kind="float32")[0].dummy_gradients == 2 * layer  # its gradient is none of a parameter
    tied = load_architecture(QWEN3_8B | {"tie_word_embeddings": True}, origin="config.json")
    assert of(model=tied)[0].dummy_gradients == 2 * layer
    assert of(model=tied, grid=RankGrid(pp=2))[1].dummy_gradients == 2 * (layer + 151936 * h)
    (experts,) = of(model=DEEPSEEK, grid=RankGrid(dp=64, ep=64))
    assert experts.quantized > 2 * 58 * 4 * 3 * 7168 * 2048


def test_experts_store_what_they_receive():
    """DeepSeek-V3: 8 of 256 experts of width 2,048 for each token, and latents that tp does not divide."""
    parts = layer_activations(DEEPSEEK, 3, ParallelConfig(), LOAD)
    assert parts["moe_act"] == 2 * 8000 * 2048
    assert parts["moe"] == 2 * 8000 * (7168 + 2 * 2048 + 7168) + 1000 * (4 * 256 + 8 * 8)
    assert parts["shared_experts"] == 2 * 1000 * 3 * 2048
    assert "moe" not in layer_activations(DEEPSEEK, 0, ParallelConfig(), LOAD)
    latents = 2 * 1000 * (2 * (1536 + 512) + 64)
    for tp in (1, 4):
        split = layer_activations(DEEPSEEK, 0, ParallelConfig(tp=tp), LOAD)
        assert split["attention"] == latents + 2 * 1000 * 128 * 128 // tp
        assert split["mla_up_proj"] == 2 * 1000 * 128 * (192 + 192 + 256) // tp


def test_replayed_routes_are_kept_whatever_is_recomputed():
    """DeepSeek-V3: 8 bytes per token for each of 58 layers; Kimi-K2, with 384 experts, has 16 for each of 60."""

    def stored(model, recompute, *, has_routes):
        load = replace(LOAD, has_routes=has_routes)
        (stage,) = stage_activations(model, ParallelConfig(), recompute, load)
        return stage.stored

    kimi = json.loads((Path(__file__).parents[2] / "megatron/families/published/Kimi-K2-Instruct.json").read_text())
    for model, expected in ((DEEPSEEK, 58 * 8), (load_architecture(kimi, origin="config.json"), 60 * 16)):
        for options in (
            {"granularity": "none"},
            {"granularity": "full", "method": "uniform", "layers": 2},
            {"granularity": "full", "method": "block", "layers": 30},
            {"granularity": "selective", "modules": ["moe"]},
        ):
            recompute = RecomputeConfig(**options)
            added = stored(model, recompute, has_routes=True) - stored(model, recompute, has_routes=False)
            assert added == LOAD.tokens * expected


@pytest.mark.parametrize(("model", "tps"), [(QWEN3, (1, 2, 8)), (DEEPSEEK, (8,))], ids=["qwen3", "deepseek_v3"])
def test_weights_are_those_of_the_layout(model, tps):
    for tp in tps:
        layout = engine_layouts(model.tensors("bfloat16"), tp)[0]
        sizes = {name: 4 if spec.dtype == "float32" else 2 for name, spec in layout.tensors.items()}
        held = sum(sizes[p.tensor] * prod(stop - start for start, stop in p.box) for p in layout.pieces)
        assert engine_weights(model, EngineSizes.all(tp), 2) == held


def test_weights_in_fp8_are_those_of_the_published_folder():
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tensors = {name: spec for name, spec in DEEPSEEK.tensors("bfloat16").items() if ".layers.61." not in name}
    specs = quantize_specs(tensors, {name for name in tensors if is_quantized(name, stated)})
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    folder = sum(sizes[spec.dtype] * prod(spec.shape) for spec in specs.values())
    assert engine_weights(DEEPSEEK, EngineSizes.all(1), 2, stated) == pytest.approx(folder, rel=1e-5)
    assert folder == pytest.approx(671e9, rel=0.01)  # as many bytes as parameters
    assert engine_weights(DEEPSEEK, EngineSizes.all(1), 2) / folder == pytest.approx(2, rel=0.01)


def test_key_value_heads_are_replicated_where_tp_exceeds_them():
    heads = 2 * 128 * 4096 * 2 * 36  # keys and values of one head: columns, bytes, layers
    assert engine_weights(QWEN3, EngineSizes.all(16), 2) * 2 - engine_weights(
        QWEN3, EngineSizes.all(8), 2
    ) == pytest.approx(heads, rel=0.02)
    assert [kv_bytes_per_token(QWEN3, tp, 2) // (4 * 36 * 128) for tp in (1, 2, 8, 16)] == [8, 4, 1, 1]


def test_cache_bytes_per_token_are_the_published_ones():
    qwen3_32b = QWEN3_8B | {"num_hidden_layers": 64, "num_attention_heads": 64}
    assert kv_bytes_per_token(load_architecture(qwen3_32b, origin="config.json"), 1, 2) == 262_144
    for tp in (1, 8, 16):  # every rank stores the latent
        assert kv_bytes_per_token(DEEPSEEK, tp, 2) == 70_272


@pytest.mark.parametrize(("gpu", "fraction"), [("h100-80", 0.83), ("h200-141", 0.90)])
def test_the_default_fraction_is_sglangs(gpu, fraction):
    """0.83 and 0.90 are what its documentation and logs show for tp 1 with default options."""
    memory = gpu_memory(gpu)
    needed = engine_bytes(QWEN3, RolloutConfig(), 2, memory)
    assert default_mem_fraction(needed, memory) == pytest.approx(fraction, abs=0.005)


def test_groups_of_data_parallel_attention_hold_more_weights_and_store_latents_once():
    def of(**extra):
        rollout = RolloutConfig(tp=16, engine={"extra_args": {"ep_size": 16, **extra}})
        return engine_weights(DEEPSEEK, EngineSizes.of(rollout), 2)

    h, width = 7168, 61 * 2 * (1536 * 128 * 192 + 512 * 128 * 256 + 7168 * 128 * 128)  # heads of all layers, in bytes
    embedding = 2 * 129280 * h
    plain = of()
    assert of(attn_dp_size=4) - plain == (width + embedding) * (4 - 1) // 16
    assert of(attn_dp_size=4, enable_dp_lm_head=True) - of(attn_dp_size=4) == embedding * (4 - 1) // 16
    assert of(moe_dense_tp_size=1) - plain == 3 * 2 * 3 * h * 18432 * 15 // 16
    assert of(moe_a2a_backend="deepep") - plain == 58 * 2 * 3 * h * 2048 * 15 // 16
    grouped = RolloutConfig(tp=8, engine={"extra_args": {"attn_dp_size": 4}})
    assert engine_bytes(QWEN3, grouped, 2, H100).kv_per_token == kv_bytes_per_token(QWEN3, 2, 2)


def test_options_of_the_engine_count():
    def of(**extra):
        return engine_bytes(QWEN3, RolloutConfig(engine={"extra_args": extra}), 2, H100)

    plain = of()
    assert of(kv_cache_dtype="fp8_e5m2").kv_per_token * 2 == plain.kv_per_token
    assert plain.working - of(chunked_prefill_size=4096).working == 4096 * 1.5 * 2**20
    assert of(chunked_prefill_size=-1).working - plain.working == (16384 - 8192) * 1.5 * 2**20
    assert plain.graphs - of(cuda_graph_max_bs_decode=128).graphs == 128 * 2 * 2**20
    assert of(disable_cuda_graph=True).graphs == 0


def test_an_unknown_gpu_is_refused():
    with expect_error(ConfigError, "h100-80", "h100"):
        gpu_memory("h100")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-8b")
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(folder)


@pytest.fixture
def configure(model):
    """Function from a stage and its sections to a configuration with the 8B model on 8 GPUs."""

    def make(kind=RunConfig, **sections):
        placement = {"slots_per_node": 8} | sections.pop("placement", {})
        base = {"run_dir": "run", "model": {"path": model}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 1000}}
        return kind.model_validate(base | {"placement": placement} | sections)

    return make


def test_colocated(configure):
    (demand,) = gpu_demands(configure(rollout={"tp": 2, "replicas": 4}), H100)
    assert [model.name for model in demand.models] == ["policy", "reference"]
    policy, reference = demand.models
    assert policy.state.total == pytest.approx(61.5e9, rel=2e-3)
    assert reference.state.total == reference.state.parameters == policy.state.parameters
    assert (policy.is_trained, reference.is_trained, reference.offload_when_idle) == (True, False, True)
    assert demand.offload.optimizer
    assert demand.offload.gradients
    assert demand.releases_engine_memory
    assert demand.engine.weights == pytest.approx(8.19e9, rel=1e-3)
    assert (demand.nccl_bytes, demand.engine_nccl_bytes) == (NCCL_BYTES_PER_GROUP, NCCL_BYTES_PER_GROUP)
    assert demand.bucket_bytes == 2 * 256 * 2**20


def test_each_model_has_the_state_of_its_own_optimizer(configure):
    critic = {"optimizer": {"type": "sgd"}}
    sections = {
        "trainer": {"optimizer": {"type": "sgd", "kwargs": {"momentum": 0.9}}},
        "algorithm": {"type": "ppo", "critic": critic},
    }
    (demand,) = gpu_demands(configure(**sections), H100)
    (adam,) = gpu_demands(configure(algorithm={"type": "ppo"}), H100)
    moments = {model.name: model.state.moments for model in demand.models}
    of_adam = {model.name: model.state.moments for model in adam.models}
    assert (moments["policy"], moments["critic"]) == (of_adam["policy"] // 2, 0)
    assert of_adam["critic"] > 0


def test_disaggregated(configure):
    placement = {"pools": {"b": {"slots_per_node": 4}}, "rollout": {"pool": "b"}}
    main, engines = gpu_demands(configure(placement=placement), H100)
    assert (main.pool, engines.pool) == ("main", "b")
    assert main.engine is None
    assert not main.offload.is_enabled
    assert engines.models == ()
    assert engines.engine is not None
    assert not engines.releases_engine_memory
    assert main.bucket_bytes == engines.bucket_bytes > 0


def test_every_combination_of_stages_is_planned(configure):
    """The policy has 4 stages on 8 GPUs, and the critic 2: four combinations."""
    algorithm = {"type": "ppo", "critic": {"parallel": {"pp": 2}}}
    demands = gpu_demands(configure(trainer={"parallel": {"pp": 4}}, algorithm=algorithm), H100)
    assert [demand.rank for demand in demands] == [0, 2, 4, 6]
    policies = [demand.models[0] for demand in demands]
    critics = [next(model for model in demand.models if model.name == "critic") for demand in demands]
    assert [policy.activations.head > 0 for policy in policies] == [False, False, False, True]
    assert critics[0] == critics[1] != critics[2] == critics[3]
    assert critics[3].activations.head < policies[3].activations.head  # one value per token instead of logits
    assert policies[0].state.total > policies[1].state.total  # the embedding
    assert policies[0].activations.stored == 4 * policies[3].activations.stored


def test_models_with_a_pool_of_their_own_stay_on_their_gpus(configure):
    placement = {"pools": {"c": {"slots_per_node": 8}}, "critic": {"pool": "c"}}
    algorithm = {"type": "ppo", "critic": {"optimizer": {"distributed": False}}}
    main, critics = gpu_demands(configure(placement=placement, algorithm=algorithm), H100)
    assert [model.name for model in main.models if model.is_trained] == ["policy"]
    (critic,) = critics.models
    assert (critic.name, critic.is_trained, critic.offload_when_idle) == ("critic", True, False)
    assert critics.bucket_bytes == 0
    assert critic.state.total == 9 * critic.state.parameters  # 18 bytes per parameter: an optimizer of its own


def test_the_longest_sequence_may_exceed_the_token_budget(configure):
    def stored(max_new_tokens, **trainer):
        config = configure(rollout={"max_new_tokens": max_new_tokens}, trainer=trainer)
        return gpu_demands(config, H100)[0].models[0].activations.stored

    assert longest_sequence(configure(rollout={"max_new_tokens": 3000})) == 4000
    assert stored(3000) == stored(3096) == stored(100)
    assert stored(7192) == 2 * stored(100)
    assert stored(7192, parallel={"cp": 2}) == stored(100)


def test_the_head_depends_on_how_it_is_computed(configure):
    def head(dtype="auto", fp32=False, **trainer):
        config = configure(trainer=trainer)
        model = config.model.model_copy(update={"dtype": dtype, "fp32_lm_head": fp32})
        return gpu_demands(config.model_copy(update={"model": model}), H100)[0].models[0].activations.head

    hidden, logits = 2 * 2 * 4096 * 4096, 4 * 4096 * 151936
    assert 0.09 * logits < head() - hidden < 0.15 * logits
    assert head(fused_lm_head=False) - hidden == logits // 2 + hidden // 2
    # the weight is as large as the logits here: it is copied, and so is its gradient
    assert head(fused_lm_head=False, fp32=True) - hidden == 3 * logits + 2 * hidden
    assert head("float32", fused_lm_head=False, fp32=True) - 2 * hidden == logits + hidden


def test_full_tensors_need_larger_buckets(configure):
    config = configure(weight_sync={"strategy": "gather_hf", "bucket_bytes": 1000})
    assert gpu_demands(config, H100)[0].bucket_bytes == 3 * 2 * 151936 * 4096


def test_fp8_copies_are_held_from_a_pass_to_an_offload(configure):
    """Of the policy during its update; of a reference during its forward pass, in which it needs half of them."""
    fp8 = {"megatron": {"model": {"fp8": "hybrid", "fp8_recipe": "blockwise"}}}
    (plain,), (demand,) = (gpu_demands(configure(trainer=trainer), H100) for trainer in ({}, fp8))
    size = demand.models[0].caches.quantized
    assert size == pytest.approx(2 * 6.95e9, rel=1e-3)
    assert [model.caches.quantized for model in plain.models] == [0, 0]
    before, after = (step_ledger(each, 0).peaks for each in (plain, demand))
    added = {phase: after[phase].total - before[phase].total for phase in after}
    assert added == {"sampling": 0, "scoring": size // 2, "training": size, "push": 0}


def test_stages_without_engines(configure, model):
    (sft,) = gpu_demands(configure(SftConfig), H100)
    assert [each.name for each in sft.models] == ["policy"]
    assert sft.engine is None
    assert not sft.offload.is_enabled
    (dpo,) = gpu_demands(configure(DpoConfig, dpo={"reference": {"path": model}}), H100)
    assert [(each.name, each.is_trained) for each in dpo.models] == [("policy", True), ("reference", False)]


def test_the_peak_of_a_phase_is_the_moment_of_its_highest_total():
    ledger = DeviceLedger()
    ledger.allocate("trainer", "parameters", 2)
    with ledger.phase("training"):
        ledger.allocate("trainer", "gradients", 4)
        ledger.allocate("trainer", "activations", 10)
        assert ledger.free("trainer", "activations") == 10
        ledger.allocate("trainer", "logits", 5)
        ledger.free("trainer", "logits")
    held = {"parameters": 2, "gradients": 4, "activations": 10}
    assert ledger.peaks["training"].by_account == {("trainer", name): size for name, size in held.items()}
    assert ledger.peaks["training"].total == 16
    assert ledger.ends["training"].total == ledger.now.total == 6


def test_what_is_freed_first_does_not_count_to_the_next_phase():
    ledger = DeviceLedger()
    for _ in range(2):
        with ledger.phase("sampling"):
            ledger.allocate("engine", "kv_cache", 7)
        with ledger.phase("training"):
            ledger.free("engine", "kv_cache")
            ledger.allocate("trainer", "gradients", 4)
            ledger.free("trainer", "gradients")
    assert {name: holdings.total for name, holdings in ledger.peaks.items()} == {"sampling": 7, "training": 4}


def test_an_account_is_allocated_and_freed_once():
    ledger = DeviceLedger()
    ledger.allocate("engine", "weights", 3)
    with ledger.phase("push"):
        pass
    assert ledger.peaks["push"].total == 3  # what is held already
    with expect_error(AssertionError, "weights", "already"):
        ledger.allocate("engine", "weights", 3)
    ledger.free("engine", "weights")
    with pytest.raises(KeyError):
        ledger.free("engine", "weights")


def test_phases_are_not_nested():
    ledger = DeviceLedger()
    with expect_error(AssertionError, "training", "within"), ledger.phase("training"), ledger.phase("push"):
        pass
