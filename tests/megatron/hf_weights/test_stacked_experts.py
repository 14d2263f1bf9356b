"""gpt-oss: stacked experts, sent from trainers that hold each one alone to engines that hold them transposed."""

import pytest
import torch

from megarl.model_files.weight_index import merge_pairs, paired_shape, stored_shape
from megarl.reshard.layout.layout import slices
from tests.megatron.fidelity.models import CONFIGS, build
from tests.megatron.hf_weights.test_export import load_folder
from tests.megatron.hf_weights.test_fp8_weights import empty_parameters, sync
from tests.megatron.ranks import run_ranks

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


def test_pairs_are_stored_one_after_another():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert paired_shape(name, (8, 48, 20)) == (8, 48, 10, 2)
    assert stored_shape(name, (8, 48, 10, 2)) == (8, 48, 20)
    assert paired_shape("model.layers.0.mlp.experts.down_proj", (8, 10, 48)) == (8, 10, 48)
    stored = torch.arange(240).view(2, 6, 20)
    box = ((1, 2), (2, 4), (3, 7), (0, 2))
    pairs = stored.view(paired_shape(name, stored.shape))[slices(box)]
    assert torch.equal(stored[slices(merge_pairs(box))], pairs.flatten(2))
