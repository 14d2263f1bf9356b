"""The interfaces of a generation engine: for agents (`GenerationEngine`) and the controller (`RolloutEngine`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # these import torch, which checks of a configuration do without
    from megarl.reshard.layout.layout import WeightLayout
    from megarl.reshard.planning.disaggregated import TransferSpec
    from megarl.reshard.planning.strategy import SyncStats
    from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket
    from megarl.reshard.transfer.process_groups import TransferGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a generation request."""

    temperature: float
    """Softmax temperature; 0.0 is greedy decoding."""
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    """Seed of this completion, honored by a deterministic engine. None: a random seed for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to sample one completion."""

    request_id: str
    token_ids: tuple[int, ...]
    """Token ids of the prompt."""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled completion of K tokens."""

    token_ids: NDArray[np.int32]
    """Sampled token ids [K], including the end-of-sequence token if one was sampled."""
    logprobs: NDArray[np.float32]
    """Log-probabilities [K] under the temperature-scaled distribution (the unscaled one when greedy)."""
    policy_versions: NDArray[np.int32]
    """Version of the weights that sampled each token [K]."""
    finish_reason: str
    """Why generation ended: `stop`, `length` or `abort`."""


class GenerationEngine(Protocol):
    """The methods of an engine that agents use."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return one completion of the request."""
        ...

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one completion per request, in order, once all are done: one inter-process call instead of many."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; it completes with finish_reason `abort`. Unknown ids are ignored."""
        ...


class RolloutEngine(GenerationEngine, Protocol):
    """The methods of an engine that the controller uses: generation, and weight updates between begin and end."""

    async def begin_weights(self) -> None:
        """Stop decoding and open a weight update."""
        ...

    async def load_weights(self, bucket: WeightBucket) -> None:
        """Write the bucket's tensors (Hugging Face names) into the engine's parameters, on every TP rank.

        Raises:
            WeightSyncError: a name is unknown to the model, a shape or dtype is wrong; no rank writes anything.
        """
        ...

    async def layouts(self) -> list[WeightLayout]:
        """Return the weight layout of each TP rank, by rank; `load_boxes` takes boxes of these local tensors."""
        ...

    async def full_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors that every update must send through `load_weights`, not as boxes.

        The engine derives other values from them when it loads them, for example (1 + w) from a norm's weight. Boxes
        of the layouts would not update these derived values. Most models have no such tensor.
        """
        ...

    async def load_boxes(self, tp_rank: int, index: int, bucket: BoxBucket | None) -> None:
        """Write TP rank `tp_rank`'s boxes of round `index` into its parameters (None if it has no boxes).

        Every TP rank has its own sender. A call returns once the parts of all ranks for the round have arrived and
        have been written; the bucket may then be reused. Rounds may overlap.

        Raises:
            WeightSyncError: a parameter is unknown, or a box is out of bounds, has another dtype, or was already
                written in this update: no rank writes anything of the round. Also raised if another rank's part did
                not arrive in time, or the engine does not reply. The update is closed. The engine serves the old
                weights if nothing of the update was written yet; otherwise it serves no requests until an update
                succeeds.
            WorkerError: the engine has exited.
        """
        ...

    async def prepare_receive(self, transfer_spec: TransferSpec, engine: int) -> None:
        """Plan what this engine's TP ranks receive, as engine number `engine` of the transfer spec.

        Raises:
            WeightSyncError: no trainer rank holds an element that the TP ranks need.
        """
        ...

    async def join_trainer(self, transfer_group: TransferGroup) -> None:
        """Connect to the trainer's ranks and to those of the other engines, which must join at the same time.

        Required once before the first `receive_weights`, and again after each one that failed.

        Raises:
            WeightSyncError: another rank did not connect in time.
        """
        ...

    async def receive_weights(self) -> list[SyncStats]:
        """Receive the weights while the trainer sends them: boxes go directly into the parameters, full tensors
        through the engine's weight loader.

        Returns:
            The transfer statistics of each TP rank, by rank.

        Raises:
            WeightSyncError: a box does not fit the engine's parameters, and no rank receives anything; or a rank of
                either side has died or is late. The update is closed, as by `load_boxes`.
            WorkerError: the engine has exited.
        """
        ...

    async def end_weights(self, policy_version: int) -> None:
        """Flush the KV cache, set the policy version, and resume decoding.

        Raises:
            WeightSyncError: a tensor of the model, or a box of one, has not arrived since `begin_weights`.
        """
        ...
