"""The Megatron ranks of `megarl convert` and `megarl score`. What imports torch is imported by the workers only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megarl.batch.balance import QWEN2_5_7B, SequenceCost
from megarl.batch.trajectory import Trajectory
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import Dispatch, Payload
from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import COMPANIONS, RELEASE, TRACKER
from megarl.megatron.request_samples import plan_replica_micro_batches
from megarl.megatron.requests import ModelSpec
from megarl.model_files.model_config import copy_companions, read_model_config

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import MegatronModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Request to score token sequences."""

    sequences: Payload[Sequence[NDArray[np.int32]]]
    """Token ids, int32 [num_tokens] for each sequence."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    max_tokens_per_micro_batch: int
    cost: SequenceCost = QWEN2_5_7B
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """This rank's micro-batches as indices into the sequences; set by dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceScores:
    """Scores of a sequence of n tokens; entry i belongs to token i + 1, given the tokens before it."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of tokens 1 to n - 1, float32 [n - 1]."""
    entropy: NDArray[np.float32]
    """Entropy of the distribution that token i + 1 is drawn from, in nats, float32 [n - 1]."""


Scores = dict[int, SequenceScores]
"""Scores by index into the sequences of the request."""


class ScoreWorker:
    """One rank that holds only its shards of the weights: no gradient buffers, no optimizer."""

    def __init__(self, spec: ModelSpec) -> None:
        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.modeling.megatron_model import MegatronModel

        self.model: MegatronModel = MegatronModel(spec)

    def score(self, request: ScoreRequest) -> Scores:
        """Return the scores of this replica's sequences on its output rank (`RankGrid.output_rank`), else {}."""
        sequences = request.sequences.fetch()
        batches = [[_as_trajectory(sequences[i]) for i in indices] for indices in request.micro_batches]
        scored = self.model.score(batches)
        groups = self.model.groups
        if not (self.model.is_last_stage and groups.tp.rank() == groups.cp.rank() == 0):
            return {}
        return {
            index: SequenceScores(logprobs=logprobs.numpy(), entropy=entropy.numpy())
            for indices, batch in zip(request.micro_batches, scored, strict=True)
            for index, (logprobs, entropy) in zip(indices, batch, strict=True)
        }


def _as_trajectory(token_ids: NDArray[np.int32]) -> Trajectory:
    n = len(token_ids)
    return Trajectory(
        prompt_id="",
        group_id=0,
        token_ids=token_ids,
        loss_mask=np.zeros(n, np.bool_),
        logprobs=np.zeros(n, np.float32),
        policy_versions=np.full(n, -1, np.int32),
    )


def _split(request: ScoreRequest, grid: RankGrid) -> list[ScoreRequest]:
    plan = plan_replica_micro_batches(
        request.lengths, grid, max_tokens=request.max_tokens_per_micro_batch, cost=request.cost
    )
    requests = [replace(request, micro_batches=micro_batches) for micro_batches in plan]
    return [requests[grid.coordinates(rank).dp] for rank in range(grid.size)]


def _merge(results: Sequence[Scores], _: RankGrid) -> Scores:
    return reduce(or_, results)


SCORE_BY_DP: Dispatch[ScoreRequest, Scores] = Dispatch(_split, _merge)
"""Splits sequences over data-parallel replicas and merges the scores of all replicas."""


class ConvertWorker:
    """One rank that holds only its shards of the weights. Every method is a collective call on all ranks."""

    def __init__(self, spec: ModelSpec) -> None:
        """Build the model described by `spec.model_path`/config.json, without loading weights."""
        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.modeling.megatron_model import MegatronModel

        self.model: MegatronModel = MegatronModel(replace(spec, weights="none"))

    def read_hf(self, folder: str) -> None:
        """Load the parameters from the safetensors files in `folder`."""
        from megarl.megatron import local_layout

        local_layout.read_weights(folder, self.model.layout, self.model.tensors())

    def read_checkpoint(self, folder: str) -> None:
        """Load the parameters from the distributed checkpoint in `folder`."""
        from megarl.megatron.checkpoint import model_state

        model_state.load_model(self.model, folder)

    def read_trusted_checkpoint(self, folder: str) -> None:
        """Load the parameters from the distributed checkpoint in `folder`, whose index may execute code."""
        from megarl.megatron.checkpoint import model_state

        model_state.load_model(self.model, folder, trust=True)

    def write_hf(self, folder: str) -> None:
        """Export the model in Hugging Face format to `folder`, with the source model's tokenizer files."""
        from megarl.megatron import hf_export

        hf_export.save(self.model, self.model.spec.model_path, folder)

    def write_checkpoint(self, root: str) -> None:
        """Write a Megatron checkpoint to `root`, laid out as described in `checkpoint_files`."""
        import torch.distributed as dist

        from megarl.megatron.checkpoint import model_state
        from megarl.megatron.families.load_architecture import STACKED_EXPERTS
        from megarl.megatron.hf_export import describe_weights, save_passed

        model_state.save_model(self.model, Path(root) / RELEASE)
        if dist.get_rank() != 0:
            return
        try:
            source, companions = Path(self.model.spec.model_path), Path(root) / COMPANIONS
            companions.mkdir()
            copy_companions(source, companions)
            save_passed(self.model, source, companions)
            config = read_model_config(source)
            model = self.model.architecture
            describe_weights(config, model)
            if model.experts is not None and model.experts.is_stacked and not model.experts.biases:
                config[STACKED_EXPERTS] = True
            (companions / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (Path(root) / TRACKER).write_text(RELEASE)
        except OSError as e:
            raise DataError(f"{root}: rank 0 could not write the checkpoint: {e}") from e
