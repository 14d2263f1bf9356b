"""One rank's part of every sync, and of delta syncs copies of what it has sent, and the exchange of what has changed.

    no update     a full sync that is no base of others: no copies
    base None     a full sync: copy all boxes that this rank sends to host memory
    base 41       compare them with the copies of sync 41, exchange counts, send codes of the changed elements

A rank has copies of the latest sync only, valid only once it has done its part of it. The controller gives the base:
the sync after which every engine that takes part has served all of the weights. After a failed sync, new connections, a
restarted engine or a resumed run there is none, and the sync is full.

The copies take as many bytes of host memory as the boxes that the rank sends: over all ranks, once the model and what
single ranks send of tensors that several hold. During a sync, codes take at most half as much, mostly some percent.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Ints
from megarl.reshard.planning.delta import CodedRound, DeltaPlan, code_name
from megarl.reshard.planning.plan_cache import RoundPlan
from megarl.reshard.planning.rounds import Round
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.bucket import CodeSink, Parameters, ShardSink, SyncMemory, view_box
from megarl.reshard.transfer.element_code import as_integers, encode, whole_bytes
from megarl.reshard.transfer.executor import BoxExecutor, BufferSizes, CodeReader, device_of
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, closed_on_failure, wait_for


class RankSync:
    """Runs the syncs of one rank's rounds, and keeps copies of what it has sent."""

    def __init__(
        self, rank: int, plan: RoundPlan, bucket_bytes: int, gather_group: dist.ProcessGroup | None = None
    ) -> None:
        """Prepare the syncs of a plan.

        Args:
            bucket_bytes: the plan's rounds need two buckets of this size, with codes a quarter of one more at most.
            gather_group: process group of the plan's all-gathers; None if it has none.
        """
        self._rounds, self._sizes = plan.rounds, plan.buffer_sizes
        self._rank, self._gather_group, self._memory = rank, gather_group, SyncMemory()
        unused = 2 * bucket_bytes - self._sizes.total
        self._packed_limit = max(unused // 2, bucket_bytes // 8)
        self._copies: list[Tensor] = []
        """By box that this rank holds, integers [elements] in host memory: what it has sent in the latest sync."""
        self._base: int | None = None
        """Number of the sync that the copies are of; None while they are of none."""

    @cached_property
    def plan(self) -> DeltaPlan:
        """The boxes of the plan, numbered for the first delta sync."""
        return DeltaPlan(self._rounds, -1 if self._gather_group is None else self._gather_group.rank())

    def run(
        self,
        tensors: Mapping[str, Tensor],
        sink: ShardSink | Parameters | None,
        update: DeltaUpdate | None,
        transport: Transport,
        deadline: Deadline | None = None,
    ) -> SyncStats:
        """Run a sync, as `BoxExecutor.run`; collective over all ranks of the plan, with the same `update`."""
        stats = transport.stats = SyncStats()
        deadline = deadline or Deadline(transport.timeout_seconds)
        rounds, sizes, sent, device = self._rounds, self._sizes, tensors, device_of(tensors, sink)
        base, self._base = self._base, None
        with closed_on_failure(transport, self._gather_group):
            if update is not None:
                stats.elements = sum(held.elements for held in self.plan.held)
            if update is not None and update.base is None:
                self._copy_all(tensors, transport)
            elif update is not None:
                if base != update.base:
                    raise WeightSyncError(f"rank {self._rank} has no copies of the weights of sync {update.base}")
                counts, sent = self._encode(tensors, transport)
                coded = self._code_rounds(counts, transport, deadline, device)
                rounds = tuple(each.round for each in coded)
                sizes = BufferSizes.for_rounds(rounds)
                if isinstance(sink, Parameters):
                    sink = CodeReader(sink.tensors)
                if sink is not None:
                    assert isinstance(sink, CodeSink), "a delta sync needs a sink that takes codes"
                    sink.expect_codes([each.lines for each in coded])
        executor = BoxExecutor(self._rank, rounds, sizes, self._gather_group, transport, device, self._memory)
        executor.run(sent, sink, deadline)
        self._base = None if update is None else update.number
        return stats

    def close(self) -> None:
        """Free the buffers; the copies are kept."""
        self._memory.close()

    def _copy_all(self, tensors: Mapping[str, Tensor], transport: Transport) -> None:
        """Copy all boxes that this rank holds to host memory."""
        if not self._copies:
            self._copies = [
                torch.empty(
                    held.elements,
                    dtype=as_integers(tensors[held.local]).dtype,
                    pin_memory=tensors[held.local].is_cuda,
                )
                for held in self.plan.held
            ]
        for held, copy in zip(self.plan.held, self._copies, strict=True):
            box = as_integers(view_box(tensors[held.local], held.box, held.num_bytes))
            copy.view(box.shape).copy_(box)
            transport.stats.copied_bytes += copy.nbytes
            transport.activity.progress += 1  # the others wait for this rank
        transport.stats.changed_elements = transport.stats.elements

    def _encode(self, tensors: Mapping[str, Tensor], transport: Transport) -> tuple[Ints, CodedTensors]:
        """Return how many elements of each box are sent, int64 [num_held], and the codes of them.

        These are the elements that have changed, or all of boxes whose codes would be too large to be packed.
        """
        counts = np.zeros(len(self.plan.held), np.int64)
        codes: dict[str, Tensor | Callable[[], Tensor]] = {}
        for number, (held, copy) in enumerate(zip(self.plan.held, self._copies, strict=True)):
            box = view_box(tensors[held.local], held.box, held.num_bytes)
            counts[number], code = encode(box, copy)
            if counts[number]:
                codes[code_name(held.index)] = partial(whole_bytes, box) if code is None else code
            transport.activity.progress += 1  # the others wait for this rank
        changed = counts.copy()
        transport.stats.changed_elements = int(changed.sum())
        self.plan.limit_packed(counts, self._packed_limit)
        for number in np.flatnonzero(counts != changed).tolist():
            held = self.plan.held[number]
            box = view_box(tensors[held.local], held.box, held.num_bytes)
            codes[code_name(held.index)] = partial(whole_bytes, box)
        sent_codes = [code for code in codes.values() if isinstance(code, Tensor)]
        transport.stats.copied_bytes = sum(tensor.nbytes for tensor in (*self._copies, *sent_codes))
        return counts, CodedTensors(codes, cast("dict[str, Any]", tensors))

    def _code_rounds(
        self, changed: Ints, transport: Transport, deadline: Deadline, device: torch.device
    ) -> list[CodedRound]:
        """Return the rounds to execute; `changed`: int64 [num_held], the elements to send of each box."""
        try:
            counts = self._exchange(changed, transport, deadline, device)
        except WeightSyncError as e:
            raise type(e)(f"rank {self._rank}: numbers of changed weights: {e}") from e
        coded = self.plan.select(counts)
        for full, some in zip(self._rounds, coded, strict=True):
            transport.stats.bytes_not_received += _bytes_received(full) - _bytes_received(some.round)
            transport.stats.bytes_not_delivered += full.bytes_delivered - some.round.bytes_delivered
        return coded

    def _exchange(self, changed: Ints, transport: Transport, deadline: Deadline, device: torch.device) -> Ints:
        """Return the changed elements of all boxes, int64 [num_boxes]."""
        plan, counts = self.plan, np.zeros(self.plan.num_boxes, np.int64)
        counts[: len(changed)] = changed
        if plan.gathered:
            self._gather_counts(counts, transport, deadline, device)
        sent: list[InFlight] = []
        for outgoing, incoming in zip(plan.outgoing, plan.incoming, strict=True):
            sends = [(torch.from_numpy(counts[indices]).to(device), to) for to, indices in outgoing.items()]
            receives = [
                (torch.empty(where.stop - where.start, dtype=torch.int64, device=device), source)
                for source, where in incoming.items()
            ]
            transport.stats.count_bytes += sum(data.nbytes for data, _ in receives)
            received, started = transport.start(sends, receives)
            sent += started
            wait_for(received, deadline)
            for (data, _), where in zip(receives, incoming.values(), strict=True):
                counts[where] = data.cpu().numpy()
        wait_for(sent, deadline)
        return counts

    def _gather_counts(self, counts: Ints, transport: Transport, deadline: Deadline, device: torch.device) -> None:
        """Fill in the counts of the other members' shares of all-gathers."""
        assert self._gather_group is not None
        of_members = self.plan.gathered
        out = torch.zeros(len(of_members), max(map(len, of_members)), dtype=torch.int64, device=device)
        own = of_members[self._gather_group.rank()]
        mine = out[self._gather_group.rank()].clone()
        mine[: len(own)] = torch.from_numpy(counts[own]).to(device)
        transport.stats.count_bytes += out.nbytes - mine.nbytes
        wait_for(transport.start_all_gathers([(out.view(-1), mine)], self._gather_group), deadline)
        for indices, of_member in zip(of_members, out.cpu().numpy(), strict=True):
            counts[indices] = of_member[: len(indices)]


class CodedTensors(ChainMap[str, Any]):
    """Codes of boxes by `code_name`, or functions that return them, and the tensors that a rank holds."""

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor | Callable[[], Tensor] = super().__getitem__(name)
        return found if isinstance(found, Tensor) else found()


def _bytes_received(this: Round) -> int:
    gathered = sum(gather.num_bytes - gather.share for gather in this.gathers)
    return gathered + sum(message.num_bytes for hop in this.hops for message in hop.receives)
