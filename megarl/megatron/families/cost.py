"""What one sequence costs a model to compute, for balancing ranks."""

from __future__ import annotations

from math import prod

from megarl.batch.balance import SequenceCost
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.attention import LatentAttention


def sequence_cost(model: Decoder) -> SequenceCost:
    """From the model's sizes alone."""
    attention = model.attention
    if isinstance(attention, LatentAttention):
        width = attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.v_dim)
    else:
        width = attention.num_heads * 2 * attention.head_dim
    windows = [window for window in model.windows if window]
    return SequenceCost(
        matmul_parameters=_matmul_parameters(model),
        attention_layers=model.num_layers,
        attention_width=width,
        windowed_layers=len(windows),
        window=max(windows, default=0),
    )


def _matmul_parameters(model: Decoder) -> int:
    """That one token is multiplied with, the head's included."""
    first = {model.is_routed(i): i for i in range(model.num_layers)}
    count = {routed: _of_layer(model, number) for routed, number in first.items()}
    outputs = model.vocab_size if model.head == "lm" else 1
    return sum(count[model.is_routed(i)] for i in range(model.num_layers)) + model.hidden_size * outputs


def _of_layer(model: Decoder, number: int) -> int:
    always = routed = 0
    for part in model.layer(number):
        for name in part.names():
            mapping = part.map("", name)
            assert mapping is not None, name
            rows = [rows for group in mapping.parts for rows in group if len(rows.shape) == 2]
            elements = sum((r.stop - r.start) * prod(r.shape[1:]) for r in rows)
            if mapping.expert is None:
                always += elements
            else:
                routed += elements
    return always + (routed * model.experts.routing.top_k // model.experts.num_experts if model.experts else 0)
