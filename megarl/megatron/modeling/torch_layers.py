"""torch-only layers behind megatron-core's interfaces, used where Transformer Engine is not importable, or lacks them.

megatron-core's own local pieces refuse what is needed here: `WrappedTorchNorm` sequence parallelism and weights around
zero; the local latent attention shards its down projections, with gradients that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) in float32 whatever the parameters' dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype))
        # Each tensor-parallel rank sees its slice of the sequence, so megatron-core must all-reduce this gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(x.dtype)


class PostNormLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose output, summed over the tensor-parallel ranks, is normalised."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `RowParallelLinear.forward`."""
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class DuplicatedLinear(torch.nn.Module):
    """A linear that every tensor-parallel rank holds all of: Transformer Engine's with `parallel_mode="duplicated"`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        # see RMSNorm
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The output, and no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For megatron-core's dist_checkpointing: replicated over tensor-parallel ranks."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(tensors, prefix, {}, sharded_offsets)
        return sharded


class ValueHead(torch.nn.Module):
    """An output layer that says one number a token, in float32; every tensor-parallel rank holds all of it.

    Each rank sees every token, so gradients are whole and equal on all ranks: nothing is reduced between them, and the
    parameter is not marked as sharded or as sequence-parallel, so that a gradient norm counts it once.
    """

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.gathers = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden_t1h: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[t, 1, 1] of hidden states [t, 1, h], or of this rank's share of them with sequence parallelism."""
        if self.gathers:
            # the gradient that comes back is every token's on all ranks: each takes its share and adds nothing up
            hidden_t1h = gather_from_sequence_parallel_region(
                hidden_t1h, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return F.linear(hidden_t1h.float(), self.weight.float()), None
