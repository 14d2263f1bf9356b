"""Compares traced layouts with the effect of SGLang's own `load_weights`, element by element, with real values.

The value of every element of the Hugging Face tensors is its index over all tensors. `main` runs in a process with the
environment of an engine; the cases and the differences are JSON.
"""

import json
from pathlib import Path

import torch

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.weight_layout.engine_trace import (
    TRANSPOSED,
    fold,
    model_tensors,
    trace_deduplicated,
    trace_live,
)
from megarl.engines.sglang.weight_layout.trace_child import build_model, checkpoint_tensors
from megarl.model_files.weight_index import paired_shape
from megarl.reshard.layout.layout import slices

UNTOUCHED = -7.0


def compare(folder, device, tp, options):
    spec = EngineSpec(model_path=folder, device=device, tp=tp, max_total_tokens=4096, extra_args=options)
    tensors, first, values = checkpoint_tensors(folder, "float32"), 1, {}
    for name, t in tensors.items():
        n = torch.Size(t.shape).numel()
        values[name] = torch.arange(first, first + n, dtype=torch.float64).view(t.shape)
        first += n
    out = []
    for rank in range(tp):
        meta_model = build_model(spec, rank)
        trace = trace_live(meta_model, tensors)
        assert trace_deduplicated(meta_model, tensors) == trace
        model = build_model(spec, rank, device="cpu")
        for p in model.parameters():
            p.data = torch.full_like(p.data, UNTOUCHED, dtype=torch.float64)
        assert trace_live(model, tensors).layout.pieces == trace.layout.pieces
        assert all((p == UNTOUCHED).all() for p in model.parameters())
        held = model_tensors(model)
        expected = {name: torch.full_like(p.data, UNTOUCHED) for name, p in model.named_parameters()}
        with torch.no_grad():
            model.load_weights((name, value.clone()) for name, value in values.items())
        for piece in trace.layout.pieces:
            parameter = expected[piece.local.removesuffix(TRANSPOSED)]
            parameter = parameter.mT if piece.local.endswith(TRANSPOSED) else parameter
            box = fold(parameter, len(piece.local_box))[slices(piece.local_box)]
            assert (box == UNTOUCHED).all(), piece
            value = values[piece.tensor]
            box.copy_(value.view(paired_shape(piece.tensor, tuple(value.shape), values))[slices(piece.box)])
        for pad in trace.padding:
            box = fold(expected[pad.local], len(pad.local_box))[slices(pad.local_box)]
            assert (box == UNTOUCHED).all(), pad
            box.fill_(pad.value)
        different = [name for name, t in expected.items() if not torch.equal(t, held[name])]
        untouched = [name for name, t in expected.items() if (t == UNTOUCHED).any()]
        padding = sum((t == 0).sum().item() for t in expected.values())
        out.append({"different": different, "untouched": untouched, "padding": padding, "derived": trace.derived})
    return out


def main(cases, file):
    """Write the differences of all cases to a file."""
    Path(file).write_text(json.dumps({label: compare(*case) for label, case in json.loads(cases).items()}))
