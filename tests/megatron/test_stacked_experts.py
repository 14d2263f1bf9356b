"""Stacked experts, sent from trainers that hold each one alone: gpt-oss, whose engines transpose them, and Qwen3.5."""

from pathlib import Path

import pytest
import torch

from megarl.megatron.families.load_architecture import find_weight_problems, load_architecture_from_folder
from megarl.model_files.weight_index import merge_pairs, paired_shape, stored_shape
from megarl.reshard.layout.layout import slices
from tests.megatron.checkpoint.test_model_state import convert_on_rank
from tests.megatron.fidelity.measure import TOLERANCE, assert_same_gradients, measure
from tests.megatron.fidelity.models import CONFIGS, STACKED, build, save_vision_model
from tests.megatron.fidelity.reference import SHORT, differentiate, draw
from tests.megatron.ranks import run_ranks
from tests.megatron.test_fp8_weights import empty_parameters, sync
from tests.megatron.test_hf_export import errors_of, export, load_folder, same_bits

# matrices of experts are larger than messages that are packed together
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIG = CONFIGS["gpt_oss"] | SIZES | {"layer_types": None}


def test_engine_has_the_bits_of_the_folder(tmp_path):
    from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
    from tests.engines.remote import fork_traces

    build(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    with pytest.MonkeyPatch.context() as patch:
        fork_traces(patch)
        layouts = trace_layouts(folder, tp=2, device="cuda", dtype="bfloat16")
    biases = {n: spec.dtype for n, spec in layouts[0].tensors.items() if n.endswith("gate_up_proj_bias")}
    assert set(biases.values()) == {"float32"}  # SGLang's kernels add them so
    results = run_ranks(sync, 4, tmp_path, folder, {"tp": 2, "ep": 2, "etp": 2}, layouts, "exact")
    stored = load_folder(tmp_path / "model")
    for layout, (parameters, _) in zip(layouts, results, strict=False):
        wanted = empty_parameters(layout)
        for piece in layout.pieces:
            full = stored[piece.tensor].view(layout.tensors[piece.tensor].shape)
            wanted[piece.local][slices(piece.local_box)] = full[slices(piece.box)].to(wanted[piece.local].dtype)
        for local, tensor in wanted.items():
            assert torch.equal(parameters[local], tensor.view(torch.uint8)), local


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Return folders of a Qwen3.5 with experts: its language model, and the same with a vision tower."""
    return save_vision_model(STACKED, tmp_path_factory.mktemp("qwen"))[::-1]


def stack(tensors):
    """Return tensors of single experts in the form of `STACKED`, with all gates above all ups."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors[f"{experts}{number}.{part}_proj.weight"] for number in range(8)])
            for part in ("gate", "up", "down")
        }
        stacked[experts + "gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        stacked[experts + "down_proj"] = parts["down"]
    return stacked


def test_stacked_folder_has_no_tensors_of_single_experts(qwen, model_folder):
    text, vision = map(load_folder, qwen)
    assert {name: t.shape for name, t in text.items()} == {
        name: t.shape for name, t in stack(load_folder(model_folder("qwen3_5_moe"))).items()
    }
    assert {name.replace(".language_model.", ".") for name in vision if ".visual." not in name} == text.keys()
    for folder in map(Path, qwen):
        assert find_weight_problems(folder, load_architecture_from_folder(folder)) == []


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (4, {"tp": 2, "ep": 2, "etp": 2}), (2, {"pp": 2})], ids=str)
def test_logprobs_and_gradients_match_transformers(world, sizes, qwen, tmp_path):
    sequences = draw(SHORT, CONFIGS["qwen3_5_moe"]["vocab_size"])
    want = differentiate(qwen[0], sequences)
    got = measure(qwen[0], sequences, tmp_path, world=world, **sizes)
    for i, logprobs in enumerate(want.scores):
        torch.testing.assert_close(got.token_scores[i], logprobs, rtol=0, atol=TOLERANCE)
    assert_same_gradients(got.gradients, want.gradients)


@pytest.mark.parametrize(
    "sizes", [{"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 2}, {"pp": 2, "ep": 4}], ids=str
)
def test_exports_keep_the_stacks(sizes, qwen, tmp_path):
    outcomes = export(tmp_path, qwen[1], **sizes)
    assert errors_of(outcomes) == [None] * len(outcomes)
    same_bits(tmp_path / "out", qwen[1])


def test_stacks_survive_conversion_to_megatron_and_back(qwen, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    run_ranks(convert_on_rank, 1, tmp_path, qwen[1], str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    same_bits(tmp_path / "out", qwen[1])
    assert "stacked" not in (tmp_path / "out/config.json").read_text()


@pytest.mark.parametrize("strategy", ["exact", "micro_dp"])
def test_engine_has_the_stacks_of_the_folder(strategy, qwen, tmp_path):
    """The tower is not in the layouts, so that a sync leaves the engine's alone; all other tensors are."""
    from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
    from tests.engines.remote import fork_traces

    with pytest.MonkeyPatch.context() as patch:
        fork_traces(patch)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        layouts = trace_layouts(qwen[1], tp=2 if strategy == "exact" else 1, device="cuda", dtype="bfloat16")
    stored = load_folder(qwen[1])
    sent = {piece.tensor for layout in layouts for piece in layout.pieces}
    assert sent == {name for name in stored if not name.startswith("model.visual.")}
    parallel = {"tp": 2, "ep": 2, "etp": 2} if strategy == "exact" else {"tp": 2}
    results = run_ranks(sync, 4 if strategy == "exact" else 2, tmp_path, qwen[1], parallel, layouts, strategy)
    for layout, (parameters, _) in zip(layouts, results, strict=False):
        assert not any("visual" in local for local in parameters)
        wanted = empty_parameters(layout)
        for piece in layout.pieces:
            part = stored[piece.tensor].bfloat16()[slices(piece.box)]
            wanted[piece.local][slices(piece.local_box)] = part.to(wanted[piece.local].dtype)
        for local, tensor in wanted.items():
            assert torch.equal(parameters[local], tensor.view(torch.uint8)), local


def test_pairs_are_stored_one_after_another():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    names = (name, f"{name}_bias")
    assert paired_shape(name, (8, 48, 20), names) == (8, 48, 10, 2)
    assert paired_shape(name, (8, 20, 48), (name,)) == (8, 20, 48), "gates above ups"
    assert stored_shape(name, (8, 20, 48)) == (8, 20, 48)
    assert stored_shape(name, (8, 48, 10, 2)) == (8, 48, 20)
    assert paired_shape("model.layers.0.mlp.experts.down_proj", (8, 10, 48), names) == (8, 10, 48)
    stored = torch.arange(240).view(2, 6, 20)
    box = ((1, 2), (2, 4), (3, 7), (0, 2))
    pairs = stored.view(paired_shape(name, stored.shape, names))[slices(box)]
    assert torch.equal(stored[slices(merge_pairs(box))], pairs.flatten(2))
