"""One Megatron rank's shard of a model: process groups, model chunks, weights, forward and backward passes.

Every method is a collective call on all ranks. Shapes: T tokens of a pack, t of them on this rank (t = T without
context parallelism), v = V/tp share of the vocabulary. Names end in their shape: `logits_1tv` is [1, t, V/tp].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.batch.pack import ColumnName, PackedBatch, PerToken, pack
from megarl.batch.trajectory import Trajectory
from megarl.megatron.families.layout_checks import pipeline_split
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.hf_weights import local_layout
from megarl.megatron.modeling.gpt_model import build_chunks
from megarl.megatron.modeling.logprobs import token_entropy, token_logprobs
from megarl.megatron.modeling.packed_seq import TorchPackedSeqParams, describe_pack, local_index
from megarl.megatron.modeling.transformer_config import transformer_config
from megarl.megatron.requests import ModelSpec
from megarl.megatron.runtime import parallel_state, platform
from megarl.megatron.runtime.cuda_timer import CudaTimer

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPack:
    """A packed micro-batch on this rank; with context parallelism, this rank's share of every sequence."""

    batch: PackedBatch
    """This rank's tokens, [t]; `cu_seqlens_S` describes the full pack."""
    index_t: Tensor
    """int64 [t]: index of each of this rank's tokens within the full pack."""
    attention: TorchPackedSeqParams
    """Description of the pack for the attention layers (megatron-core's `packed_seq_params`)."""


class LossFunction(Protocol):
    """Computes the loss of a micro-batch from its logits."""

    def __call__(self, logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss, and what `forward_backward` returns for this micro-batch.

        Args:
            logits_1tv: logits [1, t, V/tp] of this rank's tokens; may be overwritten. For a value model float32
                [1, t, 1]: the value of each token, the same on all tensor-parallel ranks.
        """


class MegatronModel:
    """This rank's model chunks (one, or several with the interleaved pipeline schedule), without optimizer or DDP."""

    def __init__(self, spec: ModelSpec) -> None:
        p = spec.parallel
        self.spec = spec
        self._parallel = parallel_state.init_parallel_state(
            p, seed=spec.seed, timeout=timedelta(seconds=spec.timeout_seconds)
        )
        self.groups = self._parallel.groups
        self.architecture, _ = load_architecture_and_dtype(spec.model_path, head=spec.head, family=spec.family)
        self.dtype = _compute_dtype(spec.dtype)
        self.config = transformer_config(self.architecture, p, self.dtype, spec.recompute)
        self.chunks = build_chunks(
            self.architecture, self.config, self.groups, pipeline_split(p), temperature=spec.temperature
        )
        self._mtp_tensors = local_layout.mtp_tensors(self.architecture, self.groups, self.dtype)
        tensors = self.tensors()
        self.layout = local_layout.make_layout(self.architecture, tensors, self.groups, self.dtype)
        if spec.weights == "hf":
            local_layout.read_weights(
                spec.model_path, self.layout, tensors, optional_tensors=self.architecture.optional_tensors
            )
        self.is_last_stage = self.groups.pp.rank() == self.groups.pp.size() - 1
        self.forward_timer = CudaTimer() if platform.is_cuda() else None
        """GPU time of the forward passes of this rank's stage, without the waits for other stages; None on CPUs."""

    def activate(self) -> None:
        """Make megatron-core use this model's process groups and RNG states.

        Must precede every use of the model through megatron-core.
        """
        self._parallel.activate()

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters by the local names that `layout` uses."""
        return local_layout.local_tensors(self.chunks) | self._mtp_tensors

    def pack(
        self, trajectories: Sequence[Trajectory], columns: Mapping[ColumnName, Sequence[float | PerToken]] | None = None
    ) -> LocalPack:
        """Pack trajectories into one micro-batch on this rank's device, padded for context and sequence parallelism."""
        cp = self.groups.cp
        sequence_multiple = 2 * cp.size() if cp.size() > 1 else 1
        tp = self.groups.tp.size() if self.config.sequence_parallel else 1
        multiple = lcm(sequence_multiple, cp.size() * tp)
        packed = pack(trajectories, columns, multiple=multiple, sequence_multiple=sequence_multiple)
        index_t = local_index(packed.cu_seqlens_S, cp.rank(), cp.size())
        if cp.size() > 1:
            packed = packed.take(index_t)
        packed = packed.to(platform.device())
        attention = describe_pack(packed.cu_seqlens_S, cp_rank=cp.rank(), cp_size=cp.size())
        return LocalPack(batch=packed, index_t=index_t.to(platform.device()), attention=attention)

    def forward_backward(
        self,
        packs: Sequence[LocalPack],
        loss: LossFunction,
        *,
        ddp_chunks: Sequence[DistributedDataParallel] | None = None,
    ) -> list[dict[str, Tensor]]:
        """Run megatron-core's pipeline schedule over the micro-batches.

        Args:
            loss: called on the last pipeline stage for each micro-batch.
            ddp_chunks: the DDP-wrapped chunks, which accumulate gradients; None: forward only.

        Returns:
            The second result of `loss` for each micro-batch; empty except on the last pipeline stage.
        """
        self.activate()
        chunks = [chunk.module for chunk in self.chunks] if ddp_chunks is None else list(ddp_chunks)
        interleaved = len(chunks) > 1
        # the interleaved schedule needs a multiple of pp micro-batches
        num_padding = -len(packs) % self.groups.pp.size() if interleaved else 0
        batches = [(packed, loss) for packed in packs] + [(self.pack([]), zero_loss)] * num_padding

        def step(
            data: Iterator[tuple[LocalPack, LossFunction]], module: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
            packed, batch_loss = next(data)
            tokens = packed.batch
            with nullcontext() if self.forward_timer is None else self.forward_timer.measure():
                output = module(
                    tokens.token_ids_T[None], tokens.position_ids_T[None], None, packed_seq_params=packed.attention
                )

            def scaled(logits_1tv: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                value, outputs = batch_loss(logits_1tv, packed)
                return value * len(batches), outputs  # megatron-core divides by the number of micro-batches

            return output, scaled

        outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in chunks] if interleaved else iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=max(len(packed.index_t) for packed, _ in batches),
            micro_batch_size=1,
            forward_only=ddp_chunks is None,
        )
        return outputs[: len(packs)]

    @torch.no_grad()
    def logprobs(self, packs: Sequence[LocalPack]) -> list[Tensor]:
        """Return target log-probabilities, float32 [t] per micro-batch; empty except on the last pipeline stage."""

        def keep(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs_t = token_logprobs(logits_1tv[0], packed.batch.target_ids_T)
            return logprobs_t.new_zeros(()), {"logprobs_t": logprobs_t}

        return [output["logprobs_t"] for output in self.forward_backward(packs, keep)]

    @torch.no_grad()
    def values(self, packs: Sequence[LocalPack]) -> list[Tensor]:
        """Return values, float32 [t] per micro-batch; empty except on the last pipeline stage. Value models only."""
        assert self.architecture.head == "value", self.architecture.name

        def keep(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            return logits_1tv.new_zeros(()), {"values_t": logits_1tv[0, :, 0]}

        return [output["values_t"] for output in self.forward_backward(packs, keep)]

    @torch.no_grad()
    def forward_sequences(
        self, micro_batches: Sequence[Sequence[Trajectory]], compute: Callable[[Tensor, LocalPack], Tensor]
    ) -> list[list[Tensor]]:
        """Run a forward pass; returns float32 [c, n] on the host for each trajectory of n tokens, by micro-batch.

        On the last pipeline stage all tensor- and context-parallel ranks return the same; on other stages the list is
        empty.

        Args:
            compute: maps logits [t, V/tp] of this rank's tokens, which may be overwritten, to outputs [c, t].
        """
        packs = [self.pack(trajectories) for trajectories in micro_batches]

        def keep(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            out_ct = compute(logits_1tv[0], packed)
            return out_ct.new_zeros(()), {"out_ct": out_ct}

        results = []
        for output, packed, trajectories in zip(self.forward_backward(packs, keep), packs, micro_batches, strict=False):
            out_cT = self._gather_pack(output["out_ct"], packed).cpu()
            starts = packed.batch.cu_seqlens_S.tolist()
            results.append([out_cT[:, at : at + t.num_tokens] for at, t in zip(starts, trajectories, strict=False)])
        return results

    def score(self, micro_batches: Sequence[Sequence[Trajectory]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Return (log-probabilities, entropies), float32 [n - 1] each, per trajectory of n tokens, by micro-batch."""

        def compute(logits_tv: Tensor, packed: LocalPack) -> Tensor:
            entropy_t = token_entropy(logits_tv, self.groups.tp)
            return torch.stack([token_logprobs(logits_tv, packed.batch.target_ids_T), entropy_t])

        results = self.forward_sequences(micro_batches, compute)
        return [[(out[0, :-1], out[1, :-1]) for out in batch_results] for batch_results in results]

    def _gather_pack(self, x_ct: Tensor, packed: LocalPack) -> Tensor:
        """Assemble the full pack [c, T] from the shares [c, t] of the context-parallel ranks."""
        x_cT = x_ct.new_zeros(len(x_ct), int(packed.batch.cu_seqlens_S[-1]))
        x_cT[:, packed.index_t] = x_ct
        dist.all_reduce(x_cT, group=self.groups.cp)
        return x_cT


def zero_loss(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
    """Zero loss of the empty micro-batches that pad the interleaved schedule."""
    return logits_1tv.sum() * 0.0, {}


def _compute_dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if platform.is_cuda() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
