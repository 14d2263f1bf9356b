"""Test client of an engine in a separate process, because SGLang may end the process that hosts it."""

import atexit
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.box_channel import BoxSender
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, SharedBuffer, dtype_name, lay_out
from megarl.rollout.engine import GenerationRequest, Sampling
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.engine_environment import make_engine_environment
from megarl.rollout.sglang.weight_layout import offline_trace, trace_child
from tests.rollout.clock import run_in_event_loop
from tests.rollout.engine_server import ForkedProcess, start_server
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS


@functools.cache
def server_address() -> str:
    """Start the server from which this process forks engines and traces on the CPU, once; return its address."""
    folder = tempfile.TemporaryDirectory(prefix="megarl-test-")
    server, address = start_server(folder.name, engine_variables(EngineSpec(model_path="")))

    def stop() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(stop)
    return address


def engine_variables(spec: EngineSpec) -> dict[str, str]:
    """Return the environment of an engine's process."""
    environment = os.environ | make_engine_environment(spec.device, spec.tp) | {"OMP_NUM_THREADS": "1"}
    folders = [environment.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    return environment | {"PYTHONPATH": os.pathsep.join(folders)}


def host_engine(address: str) -> None:
    """Host an engine until the client at `address` ends it."""
    from tests.rollout import engine_process

    run_in_event_loop(engine_process.main(address))


def trace_in_forked_process(
    command: Sequence[str], *, env: Mapping[str, str], timeout: float, **_: bool
) -> subprocess.CompletedProcess[bytes]:
    """Trace an engine as the command of `offline_trace`, in a process that need not import SGLang first."""
    assert command[:3] == [sys.executable, "-m", trace_child.__name__]
    process = ForkedProcess(server_address(), {**env}, trace_child.main, *command[3:])
    return subprocess.CompletedProcess(command, process.wait(timeout), b"", b"")


def fork_traces(patch: pytest.MonkeyPatch) -> None:
    """Fork the processes that trace engines from one that has imported SGLang, which takes seconds."""
    stand_in = SimpleNamespace(run=trace_in_forked_process, TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr(offline_trace, "subprocess", stand_in)


class RemoteEngine:
    """An engine, or its part of a node, in a process of its own.

    The process is forked from one that has imported SGLang, which takes seconds, except for CUDA and later nodes.
    """

    def __init__(self, spec: EngineSpec):
        self.folder = tempfile.TemporaryDirectory(prefix="megarl-test-")
        address = f"{self.folder.name}/socket"
        listener = Listener(address, authkey=b"tests")
        environment, script = engine_variables(spec), Path(__file__).with_name("engine_process.py")
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if spec.device == "cpu" and spec.node_rank == 0:
            self.process = ForkedProcess(server_address(), environment, host_engine, address)
        else:
            self.process = subprocess.Popen([sys.executable, "-P", str(script), address], env=environment)
        self.connection = listener.accept()
        self.connection.send(spec)
        self.futures: dict[int, Future] = {}
        self.numbers = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, method, *args) -> Future:
        number, future = next(self.numbers), Future()
        future.set_running_or_notify_cancel()  # a caller that gives up must not cancel it
        self.futures[number] = future
        self.connection.send((number, method, args))
        return future

    def call(self, method, *args):
        return self.submit(method, *args).result(HANG_SECONDS)

    def generate(self, prompts, **sampling):
        return self.call("generate_many", requests(prompts, **sampling))

    def scheduler_processes(self):
        return [psutil.Process(pid) for pid in self.call("health").scheduler_pids]

    def close(self):
        if self.process.poll() is None:
            self.connection.send(None)
        try:
            self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _read(self):
        while True:
            try:
                number, ok, value = self.connection.recv()
            except (EOFError, OSError):
                break
            future = self.futures.pop(number)
            if ok:
                future.set_result(value)
            else:
                future.set_exception(value)
        for future in self.futures.values():
            future.set_exception(EOFError("the engine's host process has ended"))


@contextmanager
def started(spec, engine_class=RemoteEngine, **changes):
    """Start an engine, with changes of its spec, and close it afterwards."""
    with engine_class(replace(spec, **changes)) as engine:
        engine.call("start")
        yield engine


def let_work(engine):
    """Return once the schedulers have answered 30 messages; after each, they compute a step of what is to be done."""
    for _ in range(30):
        engine.call("health")


def begin_requests(engine, prompts, **sampling):
    """Return requests and their futures once the engine has sampled tokens of one of them, or has ended all."""
    sent = requests(prompts, **sampling)
    pending = [engine.submit("generate", request) for request in sent]
    while not all(p.done() for p in pending):
        if engine.call("partial_outputs", {request.request_id: 0 for request in sent}):
            break
    return sent, pending


_ids = itertools.count()


def requests(prompts, temperature=1.0, max_new_tokens=20, top_p=1.0, top_k=-1):
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, top_p=top_p, top_k=top_k)
    return [
        GenerationRequest(request_id=f"request-{next(_ids)}", token_ids=tuple(p), sampling=sampling) for p in prompts
    ]


def send_bucket(engine, tensors):
    """Send `tensors` to the engine as one bucket, then overwrite and free the shared memory."""
    slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    buffer = SharedBuffer(num_bytes)
    try:
        for slot in slots:
            buffer.view(slot).copy_(tensors[slot.name])
        engine.call("load_weights", buffer.describe(slots))
        buffer.bytes.fill_(0xA5)  # whoever still reads it reads rubbish
    finally:
        buffer.close()


def sync(engine, weights, policy_version, num_buckets=3):
    """Run a complete weight update with full tensors."""
    begin_and_load(engine, weights, num_buckets)
    engine.call("end_weights", policy_version)


def begin_and_load(engine, weights, num_buckets=3):
    """Begin a weight update and send it full tensors."""
    engine.call("begin_weights")
    names = list(weights)
    for i in range(num_buckets):
        send_bucket(engine, {name: weights[name] for name in names[i::num_buckets]})


def box_bucket(boxes):
    """Copy the boxes `(local, local_box, elements)` to shared memory; return the buffer and its description."""
    slots, num_bytes = lay_out((local, t.dtype, tuple(t.shape)) for local, _, t in boxes)
    buffer = SharedBuffer(num_bytes)
    for slot, (_, _, t) in zip(slots, boxes, strict=True):
        buffer.view(slot).copy_(t)
    box_slots = [
        BoxSlot(local, box, dtype_name(t.dtype), slot.offset)
        for slot, (local, box, t) in zip(slots, boxes, strict=True)
    ]
    return buffer, BoxBucket(buffer.path, buffer.num_bytes, tuple(box_slots))


def boxes_of(layout, weights):
    return [(p.local, p.local_box, weights[p.tensor][slices(p.box)]) for p in layout.pieces]


class Senders:
    """The trainer ranks on an engine's slots, which offer boxes in rounds: [round][TP rank], None for no boxes."""

    def __init__(self, engine, rounds, stall_seconds=UNREACHED_SECONDS):
        self.buffers, self.buckets = [], []
        for per_rank in rounds:
            self.buckets.append([])
            for boxes in per_rank:
                bucket = None
                if boxes is not None:
                    buffer, bucket = box_bucket(boxes)
                    self.buffers.append(buffer)
                self.buckets[-1].append(bucket)
        self.ranks = [
            BoxSender(
                f"trainer rank {rank}",
                f"engine 0 rank {rank}",
                [() if bucket is None else bucket.slots for bucket in of_rank],
                stall_seconds,
            )
            for rank, of_rank in enumerate(zip(*self.buckets, strict=True))
        ]
        self.offers = [rank.offer for rank in self.ranks]
        self.engine = engine

    def prepare(self):
        self.engine.call("prepare_boxes", self.offers)

    def begin(self):
        for rank in self.ranks:
            rank.begin()

    def send(self, index):
        """Signal one round to all ranks; return functions that wait until it has been copied."""
        return [rank.load_boxes(index, bucket) for rank, bucket in zip(self.ranks, self.buckets[index], strict=True)]

    def send_all(self):
        for wait in [wait for index in range(len(self.buckets)) for wait in self.send(index)]:
            wait()
        for buffer in self.buffers:
            buffer.bytes.fill_(0xA5)  # whoever still reads it reads rubbish

    @property
    def failures(self):
        return [rank.failure for rank in self.ranks]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for closing in (*self.ranks, *self.buffers):
            closing.close()


def send_rounds(engine, rounds):
    """Send boxes in an open update: [round][TP rank], None for a rank without boxes in a round."""
    with Senders(engine, rounds) as senders:
        senders.prepare()
        receiving = engine.submit("receive_weights")
        senders.begin()
        senders.send_all()
        receiving.result(HANG_SECONDS)
        assert senders.failures == [""] * len(senders.ranks)


def sync_boxes(engine, layouts, weights, policy_version, num_rounds=3):
    """Run a complete weight update with boxes."""
    engine.call("begin_weights")
    ranks = [boxes_of(layout, weights) for layout in layouts]
    send_rounds(engine, [[boxes[i::num_rounds] or None for boxes in ranks] for i in range(num_rounds)])
    engine.call("end_weights", policy_version)
