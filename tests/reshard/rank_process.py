"""Ranks in separate processes, which tests stop, kill and replace."""

import gc
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass

import torch

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.transfer.sink import Parameters
from tests.time_limits import HANG_SECONDS


@dataclass
class Outcome:
    """Outcome of one call."""

    value: object
    error: str | None
    seconds: float
    buffers: int
    """Number of uint8 tensors that the call has leaked."""


class RankProcess:
    """A process that runs methods of a member object one after another."""

    def __init__(self, member, rank, *arguments):
        multiprocessing.set_forkserver_preload(["tests.megatron.preloaded"])
        context = multiprocessing.get_context("forkserver")
        self.rank, (self._end, end) = rank, context.Pipe()
        self.process = context.Process(target=_serve, args=(end, member, rank, arguments), daemon=True)
        self.process.start()
        end.close()

    def wait_started(self):
        assert self.result(HANG_SECONDS) == "started"

    def begin(self, method, *arguments):
        self._end.send((method, arguments))

    def result(self, seconds=HANG_SECONDS) -> Outcome:
        assert self._end.poll(seconds), f"rank {self.rank} does not answer"
        return self._end.recv()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.process.kill()
        self.process.join()


def call(ranks, method, *arguments):
    """Run the same call on all ranks; return their values, which requires that none fails."""
    for rank in ranks:
        rank.begin(method, *arguments)
    outcomes = [rank.result() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == [None] * len(ranks)
    return [outcome.value for outcome in outcomes]


class TransferMember:
    """A rank of a disaggregated sync; engine ranks fill their parameters with NaN before each sync."""

    def __init__(self, rank, transfer_spec, value):
        self._rank, self._value = rank, value
        self.prepare(transfer_spec)

    def prepare(self, transfer_spec):
        rank = self._rank
        self._transfer_spec, self._transfer_rank = transfer_spec, TransferRank(transfer_spec, rank)
        engine_rank = rank - len(transfer_spec.sources)
        self._need = transfer_spec.needs[engine_rank % len(transfer_spec.needs)] if engine_rank >= 0 else None
        self._parameters = {} if self._need is None else empty_parameters(self._need)

    def connect(self, transfer_group):
        self._transfer_rank.connect(transfer_group)

    def sync(self, number, fault=None, delta=None):
        """Run one sync; return its statistics and the number of wrong elements, of a delta sync those of all boxes.

        Args:
            delta: the sync may leave out what has not changed since its base.
            fault: (fault, rank): what the rank does in the middle of the sync, see `FaultyTensors`.
        """
        for tensor in self._parameters.values() if delta is None or delta.base is None else ():
            tensor.fill_(float("nan"))
        held = {}
        if self._need is None:
            held = {
                p.local: self._value(p.tensor, number)[slices(p.box)].clone()
                for p in self._transfer_spec.sources[self._rank].pieces
            }
        parameters = self._parameters
        if fault is not None and fault[0] is not None and fault[1] == self._rank:
            held, parameters = FaultyTensors(held, fault[0]), FaultyTensors(parameters, fault[0])
        target = None if self._need is None else Parameters(parameters)
        stats = self._transfer_rank.run(held, target, self._load, delta)
        mismatched = 0
        for piece in self._need.pieces if self._need is not None else ():
            got = self._parameters[piece.local][slices(piece.local_box)]
            mismatched += int((got != self._value(piece.tensor, number)[slices(piece.box)]).sum())
        return stats, mismatched

    def _load(self, whole):
        """Load full tensors as an engine does: keep this rank's part."""
        for piece in self._need.pieces:
            if piece.tensor in whole:
                self._parameters[piece.local][slices(piece.local_box)] = whole[piece.tensor][slices(piece.box)]


class FaultyTensors(dict):
    """Signals its process, or raises an error, after half of its tensors have been read.

    Given a float, sleeps on each read instead.
    """

    def __init__(self, tensors, fault):
        super().__init__(tensors)
        self._left, self._fault = len(tensors) // 2, fault

    def __getitem__(self, name):
        self._left -= 1
        if isinstance(self._fault, float):
            time.sleep(self._fault)
        elif self._left == 0 and isinstance(self._fault, Exception):
            raise self._fault
        elif self._left == 0:
            os.kill(os.getpid(), self._fault)
        return super().__getitem__(name)


def empty_parameters(layout):
    sizes = {}
    for piece in layout.pieces:
        have = sizes.get(piece.local, [0] * len(piece.local_box))
        sizes[piece.local] = [max(a, stop) for a, (_, stop) in zip(have, piece.local_box, strict=True)]
    return {name: torch.full(size, float("nan")) for name, size in sizes.items()}


def _serve(end, make_member, rank, arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    member = make_member(rank, *arguments)
    gc.freeze()  # a search through all imported objects keeps other threads from running for seconds on a busy machine
    end.send("started")
    while True:
        try:
            method, arguments = end.recv()
        except EOFError:
            return
        before = {id(tensor) for tensor in _byte_tensors()}  # torch's own, a gloo thread may hold an earlier message
        start, result, error = time.monotonic(), None, None
        try:
            result = getattr(member, method)(*arguments)
        except WeightSyncError as e:
            error = str(e)
        seconds = time.monotonic() - start
        gc.collect()
        left = sum(id(tensor) not in before for tensor in _byte_tensors())
        end.send(Outcome(result, error, seconds, left))


def _byte_tensors():
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.uint8]
