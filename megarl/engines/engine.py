"""The interfaces of a generation engine: for episodes, rollout workers and the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Routes, join_routes
from megarl.errors import MegarlError

if TYPE_CHECKING:  # these import torch, which checks of a configuration do without
    from megarl.reshard.layout.layout import Ints, WeightLayout, WeightNeeds
    from megarl.reshard.planning.disaggregated import TransferSpec
    from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
    from megarl.reshard.transfer.box_channel import BoxOffer
    from megarl.reshard.transfer.bucket import WeightBucket
    from megarl.reshard.transfer.commit_decision import CommitSpec
    from megarl.reshard.transfer.process_groups import TransferGroup


EngineMemory = Literal["weights", "kv_cache"]
"""Device memory of an engine that can be freed while another process needs it."""

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"

UNFINISHED: Final = "unfinished"
"""`Generation.finish_reason` of the first tokens of a completion that is still being sampled."""


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
class Sampling:
    """Sampling parameters of a generation request.

    Examples:
        >>> Sampling(temperature=1.0, max_new_tokens=512).within(64).max_new_tokens
        64
    """

    temperature: float
    """Softmax temperature; 0.0 is greedy decoding."""
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    """Seed of this completion, honored by a deterministic engine. None: a random seed for each request."""

    def within(self, max_new_tokens: int | None) -> Sampling:
        """Return the same parameters with at most this many tokens; None: no further limit."""
        if max_new_tokens is None or max_new_tokens >= self.max_new_tokens:
            return self
        return replace(self, max_new_tokens=max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to sample one completion.

    Examples:
        >>> sampling = Sampling(temperature=0.0, max_new_tokens=8)
        >>> GenerationRequest(request_id="g-0", token_ids=(5, 6), sampling=sampling).sampling.temperature
        0.0
    """

    request_id: str
    token_ids: tuple[int, ...]
    """Token ids of the prompt."""
    sampling: Sampling
    priority: int = 0
    """An engine that cannot sample all requests begins with those of the highest priority."""
    num_routed: int = 0
    """Number of tokens of the prompt whose routes are known; an engine that returns routes leaves theirs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled completion of K tokens.

    Examples:
        >>> generation = Generation(
        ...     token_ids=np.array([7, 2], np.int32),
        ...     logprobs=np.array([-0.5, -0.25], np.float32),
        ...     policy_versions=np.array([3, 3], np.int32),
        ...     finish_reason="stop",
        ... )
        >>> float(generation.logprobs.sum())  # log-probability of the completion
        -0.75
    """

    token_ids: NDArray[np.int32]
    """Sampled token ids [K], including the end-of-sequence token if one was sampled."""
    logprobs: NDArray[np.float32]
    """Log-probabilities [K] under the temperature-scaled distribution (the unscaled one when greedy)."""
    policy_versions: NDArray[np.int32]
    """Version of the weights that sampled each token [K]."""
    finish_reason: str
    """Why generation ended: `stop`, `length` or `abort`; `UNFINISHED` if it has not."""
    routes: Routes | None = None
    """[n, L, k]: routes of the tokens of prompt and completion from `num_routed` of the request on, without the last
    one, which the engine has not computed with; None: the engine returns none."""


def continue_after(request: GenerationRequest, part: Generation) -> GenerationRequest:
    """Return the request for what is left of a completion of `request` after its first tokens, `part`."""
    left = request.sampling.max_new_tokens - len(part.token_ids)
    assert left > 0, f"a completion of {len(part.token_ids)} tokens has ended"
    return replace(
        request,
        token_ids=(*request.token_ids, *part.token_ids.tolist()),
        sampling=replace(request.sampling, max_new_tokens=left),
        num_routed=request.num_routed + (0 if part.routes is None else len(part.routes)),
    )


def join(part: Generation, rest: Generation) -> Generation:
    """Return the completion that consists of its first tokens, `part`, and the rest, with which it ends."""
    return Generation(
        token_ids=np.concatenate([part.token_ids, rest.token_ids]),
        logprobs=np.concatenate([part.logprobs, rest.logprobs]),
        policy_versions=np.concatenate([part.policy_versions, rest.policy_versions]),
        finish_reason=rest.finish_reason,
        routes=join_routes(part.routes, rest.routes),
    )


def no_tokens() -> Generation:
    """Return the first tokens of a completion of which none was sampled yet."""
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason=UNFINISHED,
    )


def tokens_from(generation: Generation, start: int) -> Generation:
    """Return the tokens of a completion from `start` on, without routes."""
    return replace(
        generation,
        token_ids=generation.token_ids[start:],
        logprobs=generation.logprobs[start:],
        policy_versions=generation.policy_versions[start:],
        routes=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdate:
    """A weight update of one engine, which takes part in the controller's decision about all engines."""

    policy_version: int
    commit: CommitSpec
    """Where engines report that they have all weights, and learn whether to serve them."""
    receives: bool = True
    """Stop decoding, and let the TP ranks receive boxes; False: `begin_weights` has stopped it, and all tensors come
    through `load_weights`."""
    delta: DeltaUpdate | None = None
    """What the trainer ranks leave out, because the engine holds it; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What a successful update of one engine moved, and how long generation was stopped for its first and last step."""

    stats: tuple[SyncStats, ...]
    """By TP rank that received over the network."""
    open_seconds: float
    """Until the engine had stopped decoding."""
    commit_seconds: float
    """From the controller's decision until the engine resumed."""


FinishedRequest = tuple[int, Generation | MegarlError]
"""Index of a request among those that were sent together, and its completion or error."""


class CompletionEngine(Protocol):
    """The methods of an engine that episodes use."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return one completion of the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; it completes with finish_reason `abort`. Unknown ids are ignored."""
        ...


class GenerationEngine(Protocol):
    """The methods of an engine that rollout workers use."""

    def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        """Yield the completions of the requests as they finish, those that finish together in one list."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; it completes with finish_reason `abort`. Unknown ids are ignored."""
        ...

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        """Return the tokens that requests in flight have sampled so far, as far as the engine's host knows them.

        Every entry is a sign of progress, without which an engine that owes completions is taken to be stuck.

        Args:
            known: number of tokens to leave out at the beginning, by request id.

        Returns:
            The other tokens, by request id, with finish_reason `UNFINISHED`. A request that waits for the engine has an
            entry without tokens if tokens of other requests were sampled since it was last asked for. No entry for
            other requests without further tokens, and for one that has ended, whose completion is on its way.
        """
        ...


class RolloutEngine(Protocol):
    """The methods of an engine that the controller uses: device memory, and weight updates."""

    async def release(self, memory: Sequence[EngineMemory]) -> None:
        """Free these kinds of device memory, once no request is in flight; no-op for what is free already.

        The contents are lost: the engine serves no requests until all of its memory is allocated again and, after a
        release of the weights, until an update has succeeded.

        Raises:
            WorkerError: requests are still in flight after the timeout of one step of a weight update.
        """
        ...

    async def resume(self, memory: Sequence[EngineMemory]) -> None:
        """Allocate these kinds of device memory again; no-op for what is allocated."""
        ...

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
        """Return the weight layout of each TP rank, by rank: the boxes that a sync sends and their local tensors."""
        ...

    async def weight_needs(self) -> WeightNeeds:
        """Return `layouts`, and the tensors that every TP rank must receive in full, and then load by itself.

        The engine derives other values from them when it loads them, for example (1 + w) from a norm's weight. Boxes
        of the layouts would not update these derived values. Most models have no such tensor.
        """
        ...

    async def weight_needs_digest(self) -> bytes:
        """Return the digest of `weight_needs`, which is the same for all engines of a run."""
        ...

    async def update_weights(self, update: EngineUpdate) -> UpdateReport:
        """Run a weight update: stop decoding, receive, and do what the controller decides for all engines.

        Raises:
            WeightSyncError: a box does not fit the engine's parameters, a rank of either side has died or is late, or
                the controller has aborted the update. The engine serves the old weights if nothing of the update was
                written yet; otherwise it serves no requests until an update succeeds.
            WorkerError: the engine has exited.
        """
        ...

    async def prepare_boxes(self, offers: Sequence[BoxOffer]) -> None:
        """Connect each TP rank with the trainer rank on the same slot, from which it receives boxes from then on.

        Args:
            offers: by TP rank, what its trainer rank offers.

        Raises:
            WeightSyncError: a box is no part of the engine's parameters, has another dtype, or overlaps another.
        """
        ...

    async def join_trainer(self, transfer_spec: TransferSpec, engine: int, transfer_group: TransferGroup) -> None:
        """Plan what this engine's TP ranks receive, and connect them to the trainer's ranks and those of other engines.

        All ranks must join at the same time. Required before the first update, and again after each one that failed;
        if the transfer spec is that of the last call, the plan is kept.

        Args:
            engine: number of this engine in the transfer spec.

        Raises:
            WeightSyncError: no trainer rank holds an element that the TP ranks need, boxes do not fit the engine's
                parameters, or another rank did not connect in time.
        """
        ...

    async def verify_weights(self, expected: Sequence[Ints]) -> str | None:
        """Compare all weights after those of an update have arrived with the trainer's, by `sum_box`.

        Tensors and buffers that no update writes are compared with what they were when the engine had started.

        Args:
            expected: by TP rank, the sums of the pieces of its layout.

        Returns:
            What differs, on which TP rank; the update is then closed, and the engine serves no requests until an
            update succeeds. None if all is equal.
        """
        ...
