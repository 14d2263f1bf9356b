"""Planned bytes of training state against those of real trainers, on CPU ranks, and against published formulas."""

from dataclasses import replace

import pytest

from benchmarks.reshard.published import DEEPSEEK_V3, QWEN3_8B
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import OffloadConfig, ParallelConfig
from megarl.megatron.families.load_architecture import load_architecture, load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import EVEN, pipeline_split
from megarl.run.memory.training_memory import (
    ElementBytes,
    bucket_elements,
    frozen_state,
    library_caches,
    training_state,
)
from tests.megatron.fidelity.models import TWO_DTYPES, save_model
from tests.megatron.rank_models import gather
from tests.megatron.ranks import run_ranks
from tests.megatron.runtime.test_offload import make_worker, request_of

QWEN3 = load_architecture(QWEN3_8B, origin="config.json")
WORLD = 4
BF16 = ElementBytes.of("bfloat16")

SAMPLE = [
    ("qwen3", "bfloat16", {"tp": 2, "cp": 2}, True),
    ("qwen3", "bfloat16", {"pp": 2}, True),  # embeddings are tied: both stages hold them
    ("qwen3", "float32", {"tp": 2}, False),
    (TWO_DTYPES, "bfloat16", {"tp": 2}, True),
    ("qwen3_moe", "bfloat16", {"tp": 2, "ep": 2, "etp": 1}, True),
    ("deepseek_v3", "bfloat16", {"pp": 2, "ep": 2}, True),  # has MTP layers, and router biases in float32
    ("gpt_oss", "bfloat16", {"tp": 2, "ep": 2, "etp": 2}, True),  # has sinks and biases
]
OTHERS = [
    ("qwen3", "bfloat16", {}, True),
    ("qwen3", "bfloat16", {"tp": 2}, False),
    (TWO_DTYPES, "bfloat16", {"pp": 2}, False),
    ("qwen3", "float32", {"pp": 2, "vpp": 2}, True),
]


def measure_on_rank(cases):
    """Return, by case and rank, the bytes that offloading each kind of state frees after a training step."""
    results = []
    for path, dtype, sizes, distributed in cases:
        worker = make_worker(path, dtype, distributed, **sizes)
        worker.train_step(request_of(worker))
        freed = {
            kind: worker.offload(OffloadConfig(**{"optimizer": False, "gradients": False} | {kind: True})).device_bytes
            for kind in ("optimizer", "gradients", "weights")
        }
        # torch's Adam on the CPU counts steps in a tensor per parameter
        states = worker.trainer.optimizer.state
        freed["optimizer"] -= sum(states[key]["step"].nbytes for key in states)
        parameters = [p for chunk in worker.trainer.model.chunks for p in chunk.module.parameters()]
        freed["experts"] = sum(p.numel() for p in parameters if not getattr(p, "allreduce", True))
        is_mixed = dtype == "bfloat16"
        freed["float32"] = sum(p.numel() for p in parameters if p.element_size() == 4) if is_mixed else 0
        freed["dense"] = sum(p.numel() for p in parameters) - freed["experts"] - freed["float32"]
        modules = [m for chunk in worker.trainer.model.chunks for m in chunk.module.decoder.modules()]
        freed["linears"] = sum(m.weight.numel() for m in modules if type(m).__name__.endswith("Linear"))
        results.append(gather(freed))
    return results


@pytest.mark.parametrize("layouts", [SAMPLE, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["sample", "others"])
def test_planned_bytes_are_those_of_real_trainers(layouts, tmp_path):
    cases = [(save_model(name, tmp_path), *rest) for name, *rest in layouts]
    results = run_ranks(measure_on_rank, WORLD, tmp_path, cases)
    for (path, dtype, sizes, distributed), measured in zip(cases, results, strict=True):
        parallel, element = ParallelConfig(**sizes), ElementBytes.of(dtype)
        grid, case = RankGrid.of(parallel, WORLD), (path, dtype, sizes)
        model, _ = load_architecture_and_dtype(path)
        planned = training_state(model, grid, pipeline_split(parallel), element, distributed=distributed)
        fp8 = replace(element, quantized=2)
        caches = library_caches(model, grid, pipeline_split(parallel), fp8, head_kind="fused", is_trained=True)
        per_element, total = element.main_parameters + element.moments, 0.0
        for rank, freed in enumerate(measured):
            state = planned[grid.coordinates(rank).pp]
            assert freed["weights"] == state.parameters, (case, rank)
            assert freed["gradients"] == state.gradients, (case, rank)
            assert 2 * freed["linears"] == caches[grid.coordinates(rank).pp].quantized, (case, rank)
            padding = state.gradients // element.gradients - freed["dense"] - freed["experts"] - freed["float32"]
            surplus = state.main_parameters + state.moments - freed["optimizer"]
            assert 0 <= surplus <= per_element * padding, (case, rank)
            assert (padding > 0) == distributed, (case, rank)
            widths = (grid.dp * grid.cp, grid.expert_dp) if distributed else (1, 1)
            total += per_element * (freed["dense"] / widths[0] + freed["experts"] / widths[1])
            total += element.moments * freed["float32"] / widths[0]
        assert sum(freed["optimizer"] for freed in measured) == pytest.approx(total, abs=1), case


@pytest.mark.parametrize(
    ("dp", "cp", "distributed", "per_parameter"),
    [(8, 1, False, 18), (8, 1, True, 7.5), (4, 2, True, 7.5), (1, 1, True, 18)],
)
def test_bytes_per_parameter_are_megatrons(dp, cp, distributed, per_parameter):
    """18 bytes, or 6 + 12 / (dp * cp) with the distributed optimizer: Megatron-LM, `dist_optimizer.md`."""
    (state,) = training_state(QWEN3, RankGrid(dp=dp, cp=cp), EVEN, BF16, distributed=distributed)
    parameters = state.parameters / 2
    assert parameters == pytest.approx(8.19e9, rel=1e-3)
    assert state.total / parameters == pytest.approx(per_parameter, rel=1e-9)


def test_stages_differ_and_the_head_is_heavy():
    first, middle, last = (frozen_state(QWEN3, RankGrid(pp=3), EVEN, BF16)[i].parameters for i in range(3))
    embedding = 2 * 151936 * 4096
    assert first - middle == embedding
    assert last - first == 2 * 4096  # the final norm


def test_experts_have_a_shard_width_of_their_own():
    """DeepSeek-V3 has 671 billion parameters without MTP; 64 ranks hold 4 experts of each layer each."""
    model = load_architecture(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, origin="config.json")
    (whole,) = frozen_state(model, RankGrid(), EVEN, BF16)
    assert whole.parameters / 2e9 == pytest.approx(671.0, abs=0.1)
    grid = RankGrid(dp=128, ep=64)
    (state,) = training_state(model, grid, EVEN, BF16, distributed=True)
    experts = 58 * 4 * 3 * 7168 * 2048  # 58 layers with experts
    dense = whole.parameters // 2 - 64 * experts
    assert state.moments == pytest.approx(8 * (experts / 2 + dense / 128), rel=1e-4)


def test_fields_of_megatron_change_the_bytes():
    half = MegatronConfig(
        ddp={"grad_reduce_in_fp32": False},
        optimizer={"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    )
    got = ElementBytes.of("bfloat16", half)
    assert (got.gradients, got.main_parameters, got.moments) == (2, 4, 4)
    on_host = ElementBytes.of("bfloat16", MegatronConfig(optimizer={"optimizer_cpu_offload": True}))
    assert (on_host.gradients, on_host.main_parameters, on_host.moments) == (4, 0, 0)


def test_buckets_are_padded_as_in_megatron():
    assert bucket_elements([], 8) == 0
    assert bucket_elements([1], 8) == 128
    assert bucket_elements([64, 65, 1], 3) == 384  # 64 + 128 + 64 = 256, up to a multiple of 128 and of 3


def test_a_tied_embedding_on_two_stages_has_a_bucket_of_its_own():
    """megarl's vocabulary is a multiple of 64, so that only widths such as 5 show where buckets end."""
    model = load_architecture(QWEN3_8B | {"tie_word_embeddings": True}, origin="config.json")
    first, last = training_state(model, RankGrid(pp=2, dp=5), EVEN, BF16, distributed=True)
    layers = 18 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288 + 2) + 2 * 128)
    embedding, norm = 151936 * 4096, 4096

    def padded(elements):
        return -(-elements // (5 * 128)) * 5 * 128

    assert first.gradients // 4 == padded(layers) + padded(embedding) != padded(layers + embedding)
    assert last.gradients // 4 == padded(layers + norm) + padded(embedding)
