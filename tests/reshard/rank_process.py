"""Ranks in separate processes, which tests stop, kill and replace."""

import gc
import itertools
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.transfer import heartbeat
from megarl.reshard.transfer.bucket import Parameters, PrivateBuffer
from megarl.reshard.transfer.commit_decision import open_store
from megarl.reshard.transfer.heartbeat import HeartbeatTracker, SyncMonitor
from megarl.reshard.transfer.process_groups import TransferGroup
from tests.time_limits import END_SECONDS, HANG_SECONDS, UNREACHED_SECONDS, wait_until

BUCKET_FILE = "megarl-weights"
"""Name of the anonymous files of shared buckets."""

ABORT = 0.4
"""Seconds without a sign of life, of the clock of `PacedTracker`."""
INTERVAL = ABORT / heartbeat.BEATS

_numbers = itertools.count()
"""Of private buffers that `kept_buffers` has seen."""


@dataclass
class Outcome:
    """Outcome of one call."""

    value: object
    error: str | None
    buffers: int
    """Number of uint8 tensors that a failed call has leaked."""


class RankProcess:
    """A process that runs methods of a member object one after another."""

    def __init__(self, member, rank, *arguments):
        multiprocessing.set_forkserver_preload(["tests.megatron.preloaded"])
        context = multiprocessing.get_context("forkserver")
        self.rank, (self._end, end) = rank, context.Pipe()
        self.process = context.Process(target=_serve, args=(end, member, rank, arguments), daemon=True)
        self.process.start()
        end.close()
        self._num_awaited = 1

    def wait_started(self):
        assert self.result() == "started"

    def begin(self, method, *arguments):
        self._end.send((method, arguments))
        self._num_awaited += 1

    def result(self):
        assert self._end.poll(HANG_SECONDS), f"rank {self.rank} does not answer"
        self._num_awaited -= 1
        return self._end.recv()

    def settle(self):
        """Let the process continue, and drop the results that a failed test has not taken."""
        self.signal(signal.SIGCONT)
        while self._num_awaited:
            self.result()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def is_stopped_or_dead(self):
        try:
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

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


def call_in_process(function, *arguments):
    """Return what a function returns in another process."""
    multiprocessing.set_forkserver_preload(["tests.megatron.preloaded"])
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *arguments).result(HANG_SECONDS)


class PatientGroup(TransferGroup):
    """Ranks that wait for each other as long as a test may take, and beat often."""

    @property
    def interval(self):
        return INTERVAL


class Ranks:
    """Processes of all ranks, and the store through which they connect."""

    def __init__(self, backend, size, member, *arguments):
        self.backend, self.size, self._num_connects = backend, size, 0
        self.store = open_store("127.0.0.1")
        self._make = lambda rank: RankProcess(member, rank, *arguments)
        self.ranks = [self._make(rank) for rank in range(size)]

    def __enter__(self):
        for rank in self.ranks:
            rank.wait_started()
        self.connect_all()
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.close()

    def replace(self, rank):
        self.ranks[rank].close()
        self.ranks[rank] = self._make(rank)
        self.ranks[rank].wait_started()

    def connect_all(self):
        self._num_connects += 1
        name = f"group {self._num_connects}"
        group = self.heartbeat = PatientGroup(
            "127.0.0.1",
            self.store.port,
            name,
            self.size,
            UNREACHED_SECONDS,
            timeout_seconds=UNREACHED_SECONDS,
            backend=self.backend,
        )
        call(self.ranks, "connect", group)

    def sync(self, number, fault=None, delta=None):
        return call(self.ranks, "sync", number, fault, delta)

    def failing_sync(self, number, fault, delta=None):
        """Run a sync with a fault, see `FaultyTensors`; return the outcomes of the other ranks, by rank."""
        for rank in self.ranks:
            rank.begin("sync", number, fault, delta)
        return {rank.rank: rank.result() for rank in self.ranks if rank.rank != fault[1]}

    def monitored_sync(self, number, fault):
        """Run a sync with a fault, which is aborted if a rank gives no sign of life; return as `failing_sync`."""
        what, rank = fault
        if isinstance(what, Path):  # the rank lives
            tracker = partial(PacedTracker, _mark_of(what).exists, None)
        else:
            tracker = partial(PacedTracker, self.ranks[rank].is_stopped_or_dead, rank)
        monitor = SyncMonitor(replace(self.heartbeat, abort_seconds=ABORT), self.store)
        with mock.patch.object(heartbeat, "HeartbeatTracker", tracker), monitor:
            return self.failing_sync(number, fault)


class PacedTracker(HeartbeatTracker):
    """Its clock starts when a rank is lost, and ticks whenever the ranks that live have given another sign of life."""

    def __init__(self, is_lost, lost, *arguments):
        super().__init__(*arguments)
        self._is_lost, self._lost, self._seen, self._now = is_lost, lost, None, 0.0

    def observe(self, heartbeats, now):
        beats = [json.loads(each)["beat"] for rank, each in enumerate(heartbeats) if rank != self._lost]
        if not self._is_lost():
            self._seen = None
        elif self._seen is None or all(beat > seen for beat, seen in zip(beats, self._seen, strict=True)):
            self._seen, self._now = beats, self._now + INTERVAL
        return super().observe(heartbeats, self._now)


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

    def limit(self, seconds):
        """Set the timeout of the next sync."""
        self._transfer_rank.transport.timeout_seconds = seconds

    def memory(self):
        """Return `kept_buffers` of the process."""
        return kept_buffers()

    def sync(self, number, fault=None, delta=None):
        """Run one sync; return its statistics and the number of wrong elements, of a delta sync those of all boxes.

        Args:
            delta: the sync may leave out what has not changed since its base.
            fault: (fault, rank): what the rank does in the middle of the sync, see `FaultyTensors`.
        """
        for tensor in self._parameters.values() if delta is None or delta.base is None else ():
            tensor.fill_(float("nan"))
        held, parameters = {}, self._parameters
        if self._need is None:
            held = held_tensors(self._transfer_spec.sources[self._rank], self._value, number)
        if fault is not None and fault[0] is not None and fault[1] == self._rank:
            held, parameters = FaultyTensors(held, fault[0]), FaultyTensors(parameters, fault[0])
        target = None if self._need is None else Parameters(parameters)
        stats = self._transfer_rank.run(held, target, delta)
        wrong = 0 if self._need is None else wrong_elements(self._need, self._parameters, self._value, number)
        return stats, wrong


class FaultyTensors(dict):
    """After half of its tensors have been read, sends `fault` to its process if it is a signal, or raises it.

    Given a path, waits until a file exists there. Given a float, sleeps on each read instead.
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
        elif self._left == 0 and isinstance(self._fault, Path):
            _mark_of(self._fault).touch()
            assert wait_until(self._fault.exists)
        elif self._left == 0:
            os.kill(os.getpid(), self._fault)
        return super().__getitem__(name)


def _mark_of(path):
    """Return the file that exists when a rank waits for `path`."""
    return path.with_suffix(".waiting")


def held_tensors(layout, value, sync):
    """Return the tensors that a rank holds, of the values of a sync."""
    return {p.local: value(p.tensor, sync)[slices(p.box)].clone() for p in layout.pieces}


def wrong_elements(need, tensors, value, sync):
    """Return the number of elements of a rank's tensors that differ from the values of a sync."""
    boxes = ((tensors[p.local][slices(p.local_box)].cpu(), value(p.tensor, sync)[slices(p.box)]) for p in need.pieces)
    return sum(int((got != want).sum()) for got, want in boxes)


def empty_parameters(layout, device="cpu"):
    sizes = {}
    for piece in layout.pieces:
        have = sizes.get(piece.local, [0] * len(piece.local_box))
        sizes[piece.local] = [max(a, stop) for a, (_, stop) in zip(have, piece.local_box, strict=True)]
    return {name: torch.full(size, float("nan"), device=device) for name, size in sizes.items()}


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
        result, error = None, None
        try:
            result = getattr(member, method)(*arguments)
        except WeightSyncError as e:
            error = str(e.with_traceback(None))  # an error among the arguments would keep the tensors of its frames
        left = 0
        if error is not None:
            # a gloo thread may hold a message for a moment after it was sent, or until its connection has ended
            wait_until(partial(_has_no_other_byte_tensor, before), END_SECONDS)
            gc.collect()
            left = sum(id(tensor) not in before for tensor in _byte_tensors())
        end.send(Outcome(result, error, left))


def _has_no_other_byte_tensor(known):
    gc.collect()
    return all(id(tensor) in known for tensor in _byte_tensors())


def kept_buffers():
    """Return what identifies the buffers of this process -> bytes: by inode if it has them open or mapped as files."""
    gc.collect()
    buffers = [each for each in gc.get_objects() if type(each) is PrivateBuffer]
    kept = {vars(each).setdefault("number", next(_numbers)): each.num_bytes for each in buffers}
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if BUCKET_FILE in line]
    kept |= {f"mapped {inode}": 0 for _, _, _, _, inode, *_ in mapped}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listed folder is closed
            if BUCKET_FILE in os.readlink(f"/proc/self/fd/{number}"):
                stat = os.stat(f"/proc/self/fd/{number}")
                kept[f"open {stat.st_ino}"] = stat.st_size
    return kept


def _byte_tensors():
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.uint8]
