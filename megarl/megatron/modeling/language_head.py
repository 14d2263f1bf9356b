"""Output layer of a language model: log-probabilities and entropies of the tokens that a loss reads.

Shapes: t tokens of this rank (s = t/tp of them with sequence parallelism), k of them scored, v = V/tp rows of this
rank's share of the vocabulary, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor

from megarl.losses import TokenScores
from megarl.megatron.modeling.torch_layers import float32_weight
from megarl_kernels import linear_logprob_entropy, logprob_entropy_


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """How a language head computes scores."""

    temperature: float
    """Logits are divided by it."""
    fused: bool
    """Compute scores from hidden states and weight, with the logits of some columns at a time."""
    fp32: bool
    """Compute logits in float32; without it they are in the dtype of the weight. Those of a fused head always are."""


class LanguageHead(ColumnParallelLinear):  # type: ignore[misc]
    """Takes the place of a GPTModel's output layer: `forward` passes hidden states on, `score` reduces them to scores.

    Logits of a micro-batch exist only within `score`, and only of the tokens that it is asked for:

        fused    in chunks of columns, in float32; again in the backward pass, unless all fit half of the free memory
        plain    once, in the dtype of the matrix product; the backward pass overwrites them with their gradient
    """

    def __init__(
        self, layer: ColumnParallelLinear, options: HeadOptions, *, vocab_size: int, softcap: float | None
    ) -> None:
        """Take over the parameter of `layer`, which has none if the embedding is tied and on the same rank.

        Args:
            vocab_size: number of tokens; further columns of `layer` are padding and not part of the softmax.
            softcap: logits become softcap * tanh(logits / softcap), before the temperature; None: unchanged.
        """
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        if layer.weight is not None:
            self.weight = layer.weight
        self.options = options
        first_id = self.tp_group.rank() * self.output_size_per_partition
        self._softmax = {
            "vocab_start": first_id,
            "valid_columns": min(max(vocab_size - first_id, 0), self.output_size_per_partition),
            "inv_temperature": 1.0 / options.temperature,
            "softcap": softcap,
            "group": self.tp_group if self.tp_group.size() > 1 else None,
        }

    @override
    def forward(
        self, hidden_s1h: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return the hidden states unchanged, and no bias. `score` follows after the model's forward pass."""
        return hidden_s1h, None

    def score(
        self, hidden_s1h: Tensor, target_ids_t: Tensor, index_k: Tensor | None, weight: Tensor | None = None
    ) -> TokenScores:
        """Return the scores of this rank's tokens, [t] each, with gradient; 0 where not scored.

        Args:
            index_k: int64 [k], the tokens to score, at least one; None: all.
            weight: the tied embedding's, if this layer has no parameter.
        """
        weight = self.weight if weight is None else weight
        if self.sequence_parallel:
            hidden_s1h = gather_from_sequence_parallel_region(hidden_s1h, group=self.tp_group)
        hidden_kh = hidden_s1h[:, 0]
        if index_k is None:
            logprobs_t, entropy_t = self.score_rows(hidden_kh, weight, target_ids_t)
            return TokenScores(logprobs_T=logprobs_t, entropy_T=entropy_t)
        logprobs_k, entropy_k = self.score_rows(hidden_kh[index_k], weight, target_ids_t[index_k])
        zeros_t = logprobs_k.new_zeros(len(target_ids_t))
        return TokenScores(
            logprobs_T=zeros_t.index_copy(0, index_k, logprobs_k),
            entropy_T=zeros_t.index_copy(0, index_k, entropy_k),
        )

    def score_rows(self, hidden_kh: Tensor, weight: Tensor, target_ids_k: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, float32 [k] each."""
        needs_reduction = self.tp_group.size() > 1 and not self.sequence_parallel  # of the gradient of hidden states
        if self.options.fused:
            if needs_reduction:
                hidden_kh = copy_to_tensor_model_parallel_region(hidden_kh, group=self.tp_group)
            return linear_logprob_entropy(hidden_kh, weight, target_ids_k, **self._softmax)
        if self.options.fp32:
            hidden_kh, weight = hidden_kh.float(), float32_weight(weight)
        logits_kv = linear_with_grad_accumulation_and_async_allreduce(
            hidden_kh,
            weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion and weight.is_leaf,
            allreduce_dgrad=needs_reduction,
            sequence_parallel=False,
            tp_group=self.tp_group,
        )
        return logprob_entropy_(logits_kv, target_ids_k, **self._softmax)
