"""What agents and the controller need of a generation engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.planning.disaggregated import Handover
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket
from megarl.reshard.transfer.process_groups import Meeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float
    """0.0 is greedy."""
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    """Of this completion's randomness, where the engine is deterministic. None: another one each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample."""

    request_id: str
    token_ids: tuple[int, ...]
    """The prompt."""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """K sampled tokens."""

    token_ids: NDArray[np.int32]
    """[K], the end-of-sequence token included where one was sampled."""
    logprobs: NDArray[np.float32]
    """[K], of the temperature-scaled distribution (of the unscaled one when greedy)."""
    policy_versions: NDArray[np.int32]
    """[K]."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


class GenerationEngine(Protocol):
    """What an agent sees."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """One completion."""
        ...

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """One each, in order, once all are done: one call between processes instead of many."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; it completes with finish_reason `abort`. Unknown ids are ignored."""
        ...


class RolloutEngine(GenerationEngine, Protocol):
    """What the controller sees: generation, and weights that come in buckets between begin and end."""

    async def begin_weights(self) -> None:
        """Stop decoding and open the engine for new weights."""
        ...

    async def load_weights(self, bucket: WeightBucket) -> None:
        """Write the bucket's tensors (Hugging Face names) into the engine's parameters, on every TP rank.

        Raises:
            WeightSyncError: a name is unknown to the model, a shape or dtype is wrong; no rank writes anything.
        """
        ...

    async def layouts(self) -> list[WeightLayout]:
        """What each TP rank holds, by rank; `load_boxes` takes boxes of these local tensors."""
        ...

    async def whole_tensors(self) -> tuple[str, ...]:
        """Tensors that have to arrive through `load_weights` in every update, and not as boxes.

        The engine computes values of its own from them as it loads them, on which boxes of the layouts have no effect:
        (1 + w) for a norm's weight, for one. Most models have none.
        """
        ...

    async def load_boxes(self, tp_rank: int, index: int, bucket: BoxBucket | None) -> None:
        """Write TP rank `tp_rank`'s boxes of round `index` into its parameters (None: it has none).

        Every TP rank has a sender of its own. A call returns once all ranks' parts of the round have come and have
        been written; the bucket may then be used again. Rounds may overlap.

        Raises:
            WeightSyncError: a parameter is unknown, a box is out of bounds, of another dtype, or was written before
                in this update: no rank writes anything of the round. Or another rank's part did not come in time, or
                the engine does not answer. The update is closed; the engine serves the old weights if nothing of the
                update was written before, and otherwise nothing until an update succeeds.
            WorkerError: the engine has ended.
        """
        ...

    async def prepare_receive(self, handover: Handover, engine: int) -> None:
        """Plan what this engine's TP ranks receive, as engine number `engine` of the handover.

        Raises:
            WeightSyncError: no trainer rank holds an element that they need.
        """
        ...

    async def join_trainer(self, meeting: Meeting) -> None:
        """Connect with the trainer's ranks, and with other engines'; all of them join at the same time.

        Needed once before the first `receive_weights`, and after every one that failed.

        Raises:
            WeightSyncError: another rank did not join in time.
        """
        ...

    async def receive_weights(self) -> list[SyncStats]:
        """Receive the model while the trainer sends it: boxes straight into the parameters, whole tensors to be loaded.

        Returns:
            By TP rank, what it has counted.

        Raises:
            WeightSyncError: a box does not fit the engine's parameters, and no rank receives anything; or a rank of
                either side is gone or late. The update is closed, as by `load_boxes`.
            WorkerError: the engine has ended.
        """
        ...

    async def end_weights(self, policy_version: int) -> None:
        """Drop cached keys and values, take the version, decode again.

        Raises:
            WeightSyncError: a tensor of the model, or a box of one, did not arrive since `begin_weights`.
        """
        ...
