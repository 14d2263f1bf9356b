"""Compute cost of a sequence, used to balance sequences over ranks."""

from __future__ import annotations

from math import prod

from megarl.batch.balance import SequenceCost
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import LatentAttention


def sequence_cost(model: ModelArchitecture) -> SequenceCost:
    """Return the coefficients of the model's cost per sequence, from its sizes alone."""
    attention = model.attention
    if isinstance(attention, LatentAttention):
        width = attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim)
    else:
        width = attention.num_heads * 2 * attention.head_dim
    windows = [window for window in model.window_sizes if window]
    return SequenceCost(
        matmul_parameters=_num_matmul_parameters(model),
        attention_layers=model.num_layers,
        attention_width=width,
        windowed_layers=len(windows),
        window=max(windows, default=0),
    )


def _num_matmul_parameters(model: ModelArchitecture) -> int:
    """Return the number of matrix parameters that one token is multiplied with, the output head included."""
    first = {model.has_routed_experts(i): i for i in range(model.num_layers)}
    count = {routed: _num_layer_parameters(model, number) for routed, number in first.items()}
    outputs = model.vocab_size if model.head == "lm" else 1
    return sum(count[model.has_routed_experts(i)] for i in range(model.num_layers)) + model.hidden_size * outputs


def _num_layer_parameters(model: ModelArchitecture, number: int) -> int:
    always = routed = 0
    for part in model.layer_parts(number):
        for name in part.parameter_names():
            mapping = part.map_parameter("", name)
            assert mapping is not None, name
            rows = [rows for group in mapping.parts for rows in group if len(rows.shape) == 2]
            elements = sum((r.stop - r.start) * prod(r.shape[1:]) for r in rows)
            if mapping.expert is None:
                always += elements
            else:
                routed += elements
    return always + (routed * model.experts.routing.top_k // model.experts.num_experts if model.experts else 0)
