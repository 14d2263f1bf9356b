"""One Megatron rank's part of a model: its groups, its weights, and running packs through it.

Every method is called on all ranks together. Shapes: T tokens of a pack, t of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.batch.pack import Column, PackedBatch, PerToken, pack
from megarl.batch.trajectory import Trajectory
from megarl.megatron.families.layout_checks import pipeline_split
from megarl.megatron.families.load_architecture import read_model
from megarl.megatron.hf_weights import local_layout
from megarl.megatron.modeling.gpt_model import build_chunks
from megarl.megatron.modeling.logprobs import token_entropy, token_logprobs
from megarl.megatron.modeling.packed_seq import TorchPackedSeqParams, describe_pack, local_index
from megarl.megatron.modeling.transformer_config import transformer_config
from megarl.megatron.requests import ModelSpec
from megarl.megatron.runtime import parallel_state, platform


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPack:
    """A micro-batch as this rank sees it: all of it, or with context parallelism its share of every sequence."""

    batch: PackedBatch
    """This rank's tokens; `cu_seqlens_S` is the whole pack's."""
    index_t: Tensor
    """int64 [t]: which of the pack's tokens they are."""
    attention: TorchPackedSeqParams


class Loss(Protocol):
    """From a micro-batch's logits to what is differentiated."""

    def __call__(self, logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a scalar, and what `ModelRank.run` returns of this micro-batch.

        Args:
            logits_1tv: [1, t, v] of this rank's tokens and share v of the vocabulary; may be overwritten. Of a value
                model float32 [1, t, 1]: each token's value, the same on all tensor-parallel ranks.
        """


class ModelRank:
    """This rank's chunks of the model."""

    def __init__(self, spec: ModelSpec) -> None:
        p = spec.parallel
        self.spec = spec
        self._parallel = parallel_state.start(p, seed=spec.seed, timeout=timedelta(seconds=spec.timeout_seconds))
        self.groups = self._parallel.groups
        self.model, _ = read_model(spec.model_path, head=spec.head)
        self.dtype = _compute_dtype(spec.dtype)
        self.config = transformer_config(self.model, p, self.dtype, spec.recompute)
        self.chunks = build_chunks(
            self.model, self.config, self.groups, pipeline_split(p), temperature=spec.temperature
        )
        self._carried = local_layout.carried_tensors(self.model, self.groups, self.dtype)
        tensors = self.tensors()
        self.layout = local_layout.layout(self.model, tensors, self.groups, self.dtype)
        if spec.weights == "hf":
            local_layout.read_weights(spec.model_path, self.layout, tensors, absent=self.model.absent)
        self.is_last = self.groups.pp.rank() == self.groups.pp.size() - 1

    def activate(self) -> None:
        """Have megatron-core compute with this model's layout: what calls it on the model begins with this."""
        self._parallel.activate()

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters under the names that `layout` uses."""
        return local_layout.local_tensors(self.chunks) | self._carried

    def pack(
        self, trajectories: Sequence[Trajectory], columns: Mapping[Column, Sequence[float | PerToken]] | None = None
    ) -> LocalPack:
        """One micro-batch, on this rank's device."""
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

    def run(
        self, packs: Sequence[LocalPack], loss: Loss, *, modules: Sequence[Any] | None = None
    ) -> list[dict[str, Tensor]]:
        """megatron-core's schedule over the micro-batches.

        Args:
            modules: the chunks as gradients are accumulated in them; None: forward only.

        Returns:
            What `loss` gave for each micro-batch; empty on all stages but the last.
        """
        self.activate()
        running = [chunk.module for chunk in self.chunks] if modules is None else list(modules)
        interleaved = len(running) > 1
        # the interleaved schedule takes micro-batches in groups of as many as there are stages
        missing = -len(packs) % self.groups.pp.size() if interleaved else 0
        batches = [(packed, loss) for packed in packs] + [(self.pack([]), _nothing)] * missing

        def step(data: Iterator[tuple[LocalPack, Loss]], module: Any) -> tuple[Tensor, Any]:
            packed, loss_of = next(data)
            tokens = packed.batch
            output = module(
                tokens.token_ids_T[None], tokens.position_ids_T[None], None, packed_seq_params=packed.attention
            )

            def scaled(logits_1tv: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                value, kept = loss_of(logits_1tv, packed)
                return value * len(batches), kept  # megatron-core divides by it

            return output, scaled

        outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in running] if interleaved else iter(batches),
            model=running,
            num_microbatches=len(batches),
            seq_length=max(len(packed.index_t) for packed, _ in batches),
            micro_batch_size=1,
            forward_only=modules is None,
        )
        return outputs[: len(packs)]

    @torch.no_grad()
    def logprobs(self, packs: Sequence[LocalPack]) -> list[Tensor]:
        """Per micro-batch float32 [t]: of the targets of this rank's tokens; empty on all stages but the last."""

        def keep(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs_t = token_logprobs(logits_1tv[0], packed.batch.target_ids_T)
            return logprobs_t.new_zeros(()), {"logprobs_t": logprobs_t}

        return [output["logprobs_t"] for output in self.run(packs, keep)]

    @torch.no_grad()
    def values(self, packs: Sequence[LocalPack]) -> list[Tensor]:
        """Per micro-batch float32 [t]: of this rank's tokens; empty on all stages but the last. Of value models."""
        assert self.model.head == "value", self.model.architecture

        def keep(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            return logits_1tv.new_zeros(()), {"values_t": logits_1tv[0, :, 0]}

        return [output["values_t"] for output in self.run(packs, keep)]

    @torch.no_grad()
    def of_sequences(
        self, micro_batches: Sequence[Sequence[Trajectory]], of: Callable[[Tensor, LocalPack], Tensor]
    ) -> list[list[Tensor]]:
        """Per micro-batch and trajectory of n tokens: float32 [c, n], on the host.

        On the last stage all tensor- and context-parallel ranks return the same; on other stages the list is empty.

        Args:
            of: from logits [t, v] of this rank's tokens, which may be overwritten, to what is wanted, [c, t].
        """
        packs = [self.pack(trajectories) for trajectories in micro_batches]

        def keep(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            found_ct = of(logits_1tv[0], packed)
            return found_ct.new_zeros(()), {"found_ct": found_ct}

        found = []
        for output, packed, trajectories in zip(self.run(packs, keep), packs, micro_batches, strict=False):
            found_cT = self._whole(output["found_ct"], packed).cpu()
            starts = packed.batch.cu_seqlens_S.tolist()
            found.append([found_cT[:, at : at + t.num_tokens] for at, t in zip(starts, trajectories, strict=False)])
        return found

    def score(self, micro_batches: Sequence[Sequence[Trajectory]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Per micro-batch and trajectory of n tokens: log-probabilities and entropies, float32 [n - 1] each."""

        def of(logits_tv: Tensor, packed: LocalPack) -> Tensor:
            entropy_t = token_entropy(logits_tv, self.groups.tp)
            return torch.stack([token_logprobs(logits_tv, packed.batch.target_ids_T), entropy_t])

        found = self.of_sequences(micro_batches, of)
        return [[(one[0, :-1], one[1, :-1]) for one in of_micro_batch] for of_micro_batch in found]

    def _whole(self, x_ct: Tensor, packed: LocalPack) -> Tensor:
        """[c, T] of the whole pack from each context-parallel rank's share."""
        x_cT = x_ct.new_zeros(len(x_ct), int(packed.batch.cu_seqlens_S[-1]))
        x_cT[:, packed.index_t] = x_ct
        dist.all_reduce(x_cT, group=self.groups.cp)
        return x_cT


def _nothing(logits_1tv: Tensor, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch that is there for the schedule's sake."""
    return logits_1tv.sum() * 0.0, {}


def _compute_dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if platform.is_cuda() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
