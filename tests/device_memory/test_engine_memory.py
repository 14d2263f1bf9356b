"""Bytes of engines against engine layouts, published figures and SGLang's own choice of its memory fraction."""

from math import prod

import pytest

from benchmarks.reshard.published import DEEPSEEK_V3, QWEN3_8B, engine_layouts
from megarl.config.rollout import RolloutConfig
from megarl.device_memory.engine_memory import default_mem_fraction, engine_bytes, engine_weights, kv_bytes_per_token
from megarl.device_memory.gpus import gpu_memory
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from megarl.model_files.block_fp8 import is_quantized
from megarl.reshard.layout.quantized_layout import quantize_specs

QWEN3, DEEPSEEK = (load_architecture(config, origin="config.json") for config in (QWEN3_8B, DEEPSEEK_V3))


@pytest.mark.parametrize(("model", "tps"), [(QWEN3, (1, 2, 8)), (DEEPSEEK, (8,))], ids=["qwen3", "deepseek_v3"])
def test_weights_are_those_of_the_layout(model, tps):
    for tp in tps:
        layout = engine_layouts(model.tensors("bfloat16"), tp)[0]
        sizes = {name: 4 if spec.dtype == "float32" else 2 for name, spec in layout.tensors.items()}
        held = sum(sizes[p.tensor] * prod(stop - start for start, stop in p.box) for p in layout.pieces)
        assert engine_weights(model, tp, 2) == held


def test_weights_in_fp8_are_those_of_the_published_folder():
    stated = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tensors = {name: spec for name, spec in DEEPSEEK.tensors("bfloat16").items() if ".layers.61." not in name}
    specs = quantize_specs(tensors, {name for name in tensors if is_quantized(name, stated)})
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
    folder = sum(sizes[spec.dtype] * prod(spec.shape) for spec in specs.values())
    assert engine_weights(DEEPSEEK, 1, 2, stated) == pytest.approx(folder, rel=1e-5)
    assert folder == pytest.approx(671e9, rel=0.01)  # as many bytes as parameters
    assert engine_weights(DEEPSEEK, 1, 2) / folder == pytest.approx(2, rel=0.01)


def test_key_value_heads_are_replicated_where_tp_exceeds_them():
    heads = 2 * 128 * 4096 * 2 * 36  # keys and values of one head: columns, bytes, layers
    assert engine_weights(QWEN3, 16, 2) * 2 - engine_weights(QWEN3, 8, 2) == pytest.approx(heads, rel=0.02)
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
    assert default_mem_fraction(engine_bytes(QWEN3, RolloutConfig(), 2, memory), memory) == pytest.approx(
        fraction, abs=0.005
    )


def test_options_of_the_engine_count():
    def of(**extra):
        return engine_bytes(QWEN3, RolloutConfig(engine={"extra_args": extra}), 2, gpu_memory("h100-80"))

    plain = of()
    assert of(kv_cache_dtype="fp8_e5m2").kv_per_token * 2 == plain.kv_per_token
    assert plain.working - of(chunked_prefill_size=4096).working == 4096 * 1.5 * 2**20
    assert of(chunked_prefill_size=-1).working - plain.working == (16384 - 8192) * 1.5 * 2**20
    assert plain.graphs - of(cuda_graph_max_bs_decode=128).graphs == 128 * 2 * 2**20
    assert of(disable_cuda_graph=True).graphs == 0


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"--gpu: needs one of .*h100-80.*, got h100"):
        gpu_memory("h100")
