"""One Megatron rank's shard of a model: process groups, model chunks, weights, forward and backward passes.

Every method is a collective call on all ranks. Shapes: T tokens of a pack, t of them on this rank (t = T without
context parallelism). Names end in their shape: `values_t` is [t].
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
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.batch.pack import ColumnName, PackedBatch, PerToken, pack
from megarl.batch.trajectory import Routes, Trajectory, route_dtype
from megarl.losses import ModelOutput, TokenScores, token_scores, token_values
from megarl.megatron import local_layout
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import pipeline_split
from megarl.megatron.modeling.gpt_model import HeadOptions, LanguageHead, build_chunks
from megarl.megatron.modeling.layer_spec import layer_backend
from megarl.megatron.modeling.packed_seq import TorchPackedSeqParams, describe_pack, local_index
from megarl.megatron.modeling.router import find_routers, replay_routes, router_mask
from megarl.megatron.modeling.router_replay import PackRoutes, RouteShape
from megarl.megatron.modeling.transformer_config import token_multiple, transformer_config
from megarl.megatron.requests import ModelSpec
from megarl.megatron.runtime import parallel_state, platform
from megarl.megatron.runtime.platform import CudaTimer

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
    num_tokens: int
    """Tokens of the full pack, without padding."""
    scored_index_k: Tensor | None
    """int64 [k]: the tokens of this rank whose predictions a language head scores; None: all."""


class LossFunction(Protocol):
    """Computes the loss of a micro-batch from the model's output."""

    def __call__(self, output: ModelOutput, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss, and what `forward_backward` returns for this micro-batch."""


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
        self._backend = layer_backend(self.architecture, spec.megatron, self.dtype)
        self.config = transformer_config(self.architecture, p, self.dtype, spec.recompute, spec.megatron, spec.moe)
        self._token_multiple = token_multiple(self.config)
        head = HeadOptions(
            temperature=spec.temperature,
            fused=platform.is_cuda() if spec.fused_lm_head is None else spec.fused_lm_head,
            fp32=spec.fp32_lm_head,
        )
        self.chunks = build_chunks(
            self.architecture, self.config, self.groups, pipeline_split(p), backend=self._backend, head=head
        )
        self._route_shape: RouteShape | None = None
        """Sizes of the routes of packs; None: routers choose in every pass."""
        if spec.moe.router_replay != "none":
            self._route_shape = RouteShape.of(self.architecture)
            replay_routes((chunk.module for chunk in self.chunks), self._route_shape)
        self._weights = local_layout.find_weights(self.architecture, self.chunks)
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
        return local_layout.view_weights(self._weights) | self._mtp_tensors

    def pack(
        self,
        trajectories: Sequence[Trajectory],
        columns: Mapping[ColumnName, Sequence[float | PerToken]] | None = None,
        *,
        score_all: bool = False,
        routes: Sequence[Routes | None] | None = None,
    ) -> LocalPack:
        """Pack trajectories into one micro-batch on this rank's device, padded for context and sequence parallelism.

        Args:
            score_all: score all tokens, not only those in the loss mask.
            routes: of each trajectory, where the model replays routes; None: its first forward pass records them.
        """
        cp = self.groups.cp
        sequence_multiple = 2 * cp.size() if cp.size() > 1 else 1
        multiple = lcm(sequence_multiple, self._token_multiple)
        packed = pack(trajectories, columns, multiple=multiple, sequence_multiple=sequence_multiple)
        index_t = local_index(packed.cu_seqlens_S, cp.rank(), cp.size())
        if cp.size() > 1:
            packed = packed.take(index_t)
        index_k = None if score_all else _masked_index(packed.mask_T)
        lengths = [trajectory.num_tokens for trajectory in trajectories]
        has_experts = self.architecture.experts is not None
        attention = describe_pack(
            packed.cu_seqlens_S,
            cp_rank=cp.rank(),
            cp_size=cp.size(),
            device=platform.device(),
            for_torch=not self._backend.te_layers,
            router_mask_Bt=router_mask(packed, lengths, self.config, self.groups) if has_experts else None,
            routes=self._local_routes(routes, packed.cu_seqlens_S, index_t),
        )
        return LocalPack(
            batch=packed.to(platform.device()),
            index_t=index_t.to(platform.device()),
            attention=attention,
            num_tokens=sum(lengths),
            scored_index_k=None if index_k is None else index_k.to(platform.device()),
        )

    def given_routes(self, trajectories: Sequence[Trajectory]) -> list[Routes | None] | None:
        """Return the routes of the engines, if this model replays them; None: it does not."""
        return [each.routes for each in trajectories] if self.spec.moe.router_replay == "R3" else None

    def _local_routes(
        self, routes: Sequence[Routes | None] | None, cu_seqlens_S: Tensor, index_t: Tensor
    ) -> PackRoutes | None:
        """Return this rank's part of the routes of a pack; None if routes are not replayed."""
        shape = self._route_shape
        if shape is None or routes is None:
            return None if shape is None else PackRoutes()
        local_tLk = shape.pack(routes, cu_seqlens_S)[self._router_tokens(index_t)].to(platform.device())
        by_number = dict(zip(shape.layers, local_tLk.unbind(1), strict=True))
        own = (router.layer_number for router in find_routers(chunk.module for chunk in self.chunks))
        return PackRoutes({number: by_number[number].contiguous() for number in own})

    def _router_tokens(self, index_t: Tensor) -> Tensor:
        """Return which of the tokens of a pack this rank's routers get, given those of this context-parallel rank."""
        tp = self.groups.tp
        return index_t.chunk(tp.size())[tp.rank()] if self.config.sequence_parallel else index_t

    def gather_routes(
        self, packs: Sequence[LocalPack], micro_batches: Sequence[Sequence[Trajectory]]
    ) -> list[list[Routes]]:
        """Return the routes [n, L, k] that a forward pass has recorded, of each trajectory of n tokens, by micro-batch.

        All ranks return the same. Collective call of the ranks of a replica.
        """
        shape, groups = self._route_shape, self.groups
        assert shape is not None, "this model does not replay routes"
        # NCCL has no 16-bit integers
        dtype = torch.uint8 if shape.dtype == torch.uint8 else torch.int32
        results = []
        for packed, trajectories in zip(packs, micro_batches, strict=True):
            assert packed.attention.routes is not None
            starts = packed.batch.cu_seqlens_S.tolist()
            full_TLk = torch.zeros(starts[-1], len(shape.layers), shape.top_k, dtype=dtype, device=platform.device())
            index_t = self._router_tokens(packed.index_t)
            for place, number in enumerate(shape.layers):
                if number in packed.attention.routes.by_layer:
                    full_TLk[index_t, place] = packed.attention.routes.by_layer[number].to(dtype)
            for group in (groups.cp, groups.pp, *([groups.tp] if self.config.sequence_parallel else [])):
                dist.all_reduce(full_TLk, group=group)
            full = full_TLk.cpu().numpy().astype(route_dtype(shape.num_experts))
            results.append([full[at : at + t.num_tokens] for at, t in zip(starts, trajectories, strict=False)])
        return results

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
        models = [chunk.module for chunk in self.chunks]
        chunks = models if ddp_chunks is None else list(ddp_chunks)
        unwrapped = dict(zip(chunks, models, strict=True))
        interleaved = len(chunks) > 1
        # the interleaved schedule needs a multiple of pp micro-batches
        num_padding = -len(packs) % self.groups.pp.size() if interleaved else 0
        batches = [(packed, loss) for packed in packs]
        if num_padding:
            batches += [(self.pack([]), zero_loss)] * num_padding
        if ddp_chunks is not None:
            self._weigh_router_losses(packs, len(batches))

        def step(
            data: Iterator[tuple[LocalPack, LossFunction]], module: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
            packed, batch_loss = next(data)
            tokens, model = packed.batch, unwrapped[module]
            with nullcontext() if self.forward_timer is None else self.forward_timer.measure():
                hidden = module(
                    tokens.token_ids_T[None], tokens.position_ids_T[None], None, packed_seq_params=packed.attention
                )
                output = _model_output(model, hidden, packed) if model.post_process else None

            def scaled(_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                assert output is not None, "megatron-core computes losses on the last stage only"
                value, outputs = batch_loss(output, packed)
                return value * len(batches), outputs  # megatron-core divides by the number of micro-batches

            return hidden, scaled

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

    def _weigh_router_losses(self, packs: Sequence[LocalPack], num_micro_batches: int) -> None:
        """Give the routers the weight of a token in their auxiliary losses, from the tokens of all replicas."""
        if not (self.config.moe_aux_loss_coeff or self.config.moe_z_loss_coeff):
            return
        num_tokens = sum(packed.num_tokens for packed in packs)
        total = torch.full((), num_tokens, dtype=torch.int64, device=platform.device())
        dist.all_reduce(total, group=self.groups.dp)
        # megatron-core divides auxiliary losses by the number of micro-batches, and DDP gradients by that of replicas
        token_weight = num_micro_batches * self.groups.dp.size() / total.clamp(min=1)
        for router in find_routers(chunk.module for chunk in self.chunks):
            router.start_update(token_weight)

    @torch.no_grad()
    def logprobs(self, packs: Sequence[LocalPack]) -> list[Tensor]:
        """Return target log-probabilities, float32 [t] per micro-batch; empty except on the last pipeline stage."""

        def keep(output: ModelOutput, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs_t = token_scores(output).logprobs_T
            return logprobs_t.new_zeros(()), {"logprobs_t": logprobs_t}

        return [output["logprobs_t"] for output in self.forward_backward(packs, keep)]

    @torch.no_grad()
    def values(self, packs: Sequence[LocalPack]) -> list[Tensor]:
        """Return values, float32 [t] per micro-batch; empty except on the last pipeline stage. Value models only."""

        def keep(output: ModelOutput, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            values_t = token_values(output)
            return values_t.new_zeros(()), {"values_t": values_t}

        return [output["values_t"] for output in self.forward_backward(packs, keep)]

    @torch.no_grad()
    def forward_sequences(
        self,
        micro_batches: Sequence[Sequence[Trajectory]],
        compute: Callable[[ModelOutput], Tensor],
        *,
        score_all: bool = False,
    ) -> list[list[Tensor]]:
        """Run a forward pass; returns float32 [c, n] on the host for each trajectory of n tokens, by micro-batch.

        On the last pipeline stage all tensor- and context-parallel ranks return the same; on other stages the list is
        empty.

        Args:
            compute: maps the output for this rank's tokens to [c, t].
            score_all: as in `pack`.
        """
        packs = [self.pack(of, score_all=score_all, routes=self.given_routes(of)) for of in micro_batches]
        return self.forward_packs(packs, micro_batches, compute)

    @torch.no_grad()
    def forward_packs(
        self,
        packs: Sequence[LocalPack],
        micro_batches: Sequence[Sequence[Trajectory]],
        compute: Callable[[ModelOutput], Tensor],
    ) -> list[list[Tensor]]:
        """Do as `forward_sequences`, with the packs of these micro-batches."""

        def keep(output: ModelOutput, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
            out_ct = compute(output)
            return out_ct.new_zeros(()), {"out_ct": out_ct}

        results = []
        for output, packed, trajectories in zip(self.forward_backward(packs, keep), packs, micro_batches, strict=False):
            out_cT = self._gather_pack(output["out_ct"], packed).cpu()
            starts = packed.batch.cu_seqlens_S.tolist()
            results.append([out_cT[:, at : at + t.num_tokens] for at, t in zip(starts, trajectories, strict=False)])
        return results

    def score(self, micro_batches: Sequence[Sequence[Trajectory]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Return (log-probabilities, entropies), float32 [n - 1] each, per trajectory of n tokens, by micro-batch."""

        def compute(output: ModelOutput) -> Tensor:
            scores = token_scores(output)
            return torch.stack([scores.logprobs_T, scores.entropy_T])

        results = self.forward_sequences(micro_batches, compute, score_all=True)
        return [[(out[0, :-1], out[1, :-1]) for out in batch_results] for batch_results in results]

    def _gather_pack(self, x_ct: Tensor, packed: LocalPack) -> Tensor:
        """Assemble the full pack [c, T] from the shares [c, t] of the context-parallel ranks."""
        x_cT = x_ct.new_zeros(len(x_ct), int(packed.batch.cu_seqlens_S[-1]))
        x_cT[:, packed.index_t] = x_ct
        dist.all_reduce(x_cT, group=self.groups.cp)
        return x_cT


def zero_loss(output: ModelOutput, packed: LocalPack) -> tuple[Tensor, dict[str, Tensor]]:
    """Zero loss of the empty micro-batches that pad the interleaved schedule."""
    values_t = output.logprobs_T if isinstance(output, TokenScores) else output
    return values_t.sum() * 0.0, {}


def _model_output(model: LanguageModule, output_1t: Tensor, packed: LocalPack) -> ModelOutput:
    """Return the model's output from that of its last stage: values [1, t, 1] or hidden states [1, t or t/tp, h]."""
    head = model.output_layer
    if not isinstance(head, LanguageHead):
        return output_1t[0, :, 0]
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    return head.score(output_1t.transpose(0, 1), packed.batch.target_ids_T, packed.scored_index_k, weight)


def _masked_index(mask_t: Tensor) -> Tensor | None:
    """Return the indices of the tokens in the mask, int64 [k]; None: all.

    At least one token is scored, so that every micro-batch has a gradient of every parameter.
    """
    if mask_t.all():
        return None
    index_k = mask_t.nonzero()[:, 0]
    return index_k if len(index_k) else torch.zeros(1, dtype=torch.int64)


def _compute_dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if platform.is_cuda() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
