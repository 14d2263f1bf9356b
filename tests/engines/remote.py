"""Test client of an engine in a separate process, because SGLang may end the process that hosts it."""

import atexit
import functools
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from megarl.engines.engine import GenerationRequest, Sampling
from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.engine_environment import make_engine_environment
from megarl.engines.sglang.weight_layout import offline_trace, trace_child
from megarl.engines.sglang.weight_layout.engine_trace import TRANSPOSED, fold
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.box_channel import BoxSender
from megarl.reshard.transfer.bucket import (
    BoxSlot,
    Bucket,
    SharedBuffer,
    dtype_name,
    lay_out,
    make_buffer,
    slot_view,
)
from megarl.reshard.transfer.weight_sums import sum_box
from tests.engines.engine_server import ForkedProcess, prefork_scheduler_server, start_server
from tests.rollout.clock import run_in_event_loop
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until


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
    from tests.engines import engine_process

    prefork_scheduler_server()
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

    def partial_outputs(self, sent):
        """Return the tokens so far of those of the requests that are in flight."""
        return self.call("partial_outputs", {request.request_id: 0 for request in sent})

    def wait_for_tokens(self, sent, pending, num):
        """Wait until one of the requests in flight has `num` tokens; return how many the longest has, 0 if all ended.

        The engine tells its host of tokens 50 at a time. How many more it has sampled by then is left to chance.
        """
        longest = 0

        def grows():
            nonlocal longest
            longest = max((len(part.token_ids) for part in self.partial_outputs(sent).values()), default=0)
            return longest >= num or all(future.done() for future in pending)

        assert wait_until(grows), f"no request has {num} tokens; the longest has {longest}"
        return longest

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
    with closing(engine_class(replace(spec, **changes))) as engine:
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
    while not all(p.done() for p in pending) and not any(
        len(part.token_ids) for part in engine.partial_outputs(sent).values()
    ):
        pass
    return sent, pending


_ids = itertools.count()


def requests(prompts, *, seeds=None, **sampling):
    """Return requests with names of their own; not given: temperature 1, at most 20 tokens, no seeds."""
    settings = {"temperature": 1.0, "max_new_tokens": 20, **sampling}
    return [
        GenerationRequest(
            request_id=f"request-{next(_ids)}", token_ids=tuple(prompt), sampling=Sampling(seed=seed, **settings)
        )
        for prompt, seed in zip(prompts, seeds or [None] * len(prompts), strict=True)
    ]


def send_bucket(engine, tensors):
    """Send `tensors` to the engine as one bucket, then overwrite and free the shared memory."""
    slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    buffer = SharedBuffer(num_bytes)
    try:
        for slot in slots:
            slot_view(buffer.bytes, slot).copy_(tensors[slot.name])
        engine.call("load_weights", Bucket(buffer.path, buffer.num_bytes, tuple(slots)))
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


def sums_of(layouts, weights):
    """Return the sums that an engine has to find, by TP rank and piece."""
    return [
        np.array([int(sum_box(weights[piece.tensor][slices(piece.box)], piece.box)) for piece in layout.pieces])
        for layout in layouts
    ]


def box_bucket(boxes, device="cpu"):
    """Copy the boxes `(local, local_box, elements)` to shared memory; return the buffer and its description."""
    slots, num_bytes = lay_out((local, t.dtype, tuple(t.shape)) for local, _, t in boxes)
    buffer, box_slots = make_buffer(num_bytes, torch.device(device)), []
    for slot, (local, box, t) in zip(slots, boxes, strict=True):
        slot_view(buffer.bytes, slot).copy_(t)
        box_slots.append(BoxSlot(local, box, dtype_name(t.dtype), slot.offset))
    if device == "cuda":
        torch.cuda.synchronize()
    return buffer, Bucket(buffer.path, buffer.num_bytes, tuple(box_slots))


def boxes_of(layout, weights, without=()):
    pieces = [p for p in layout.pieces if p.tensor not in without]
    return [(p.local, p.local_box, weights[p.tensor][slices(p.box)]) for p in pieces]


def digest(tensor):
    """Return a 16-byte hash of the tensor's elements, bit by bit, in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


def piece_hashes(engine, layouts):
    """Return for each TP rank: (tensor, box) of each piece of its layout -> `digest` of the parameter's values."""
    hashes = []
    with tempfile.TemporaryDirectory() as folder:
        engine.call("read_weights", folder)
        for rank, layout in enumerate(layouts):
            held = torch.load(f"{folder}/rank{rank}.pt") | torch.load(f"{folder}/rank{rank}.buffers.pt")
            held |= {name + TRANSPOSED: tensor.mT for name, tensor in held.items() if tensor.dim() > 2}
            of_rank = {}
            for p in layout.pieces:
                found = digest(fold(held[p.local], len(p.local_box))[slices(p.local_box)])
                assert of_rank.setdefault((p.tensor, p.box), found) == found, p
            hashes.append(of_rank)
    return hashes


class Senders:
    """The trainer ranks on an engine's slots, which offer boxes in rounds: [round][TP rank], None for no boxes."""

    def __init__(self, engine, rounds, device="cpu"):
        made = [[(None, None) if boxes is None else box_bucket(boxes, device) for boxes in ranks] for ranks in rounds]
        self.buffers = [buffer for ranks in made for buffer, _ in ranks if buffer is not None]
        self.buckets = [[bucket for _, bucket in ranks] for ranks in made]
        self.ranks = []
        for rank, of_rank in enumerate(zip(*self.buckets, strict=True)):
            slots = [() if bucket is None else bucket.slots for bucket in of_rank]
            self.ranks.append(BoxSender(f"trainer rank {rank}", f"engine 0 rank {rank}", slots, UNREACHED_SECONDS))
        self.engine = engine

    def prepare(self):
        self.engine.call("prepare_boxes", [rank.offer for rank in self.ranks])

    def begin(self):
        for rank in self.ranks:
            rank.begin()

    def receive(self):
        """Begin with the engine in an open update; return the future of its `receive_weights`."""
        receiving = self.engine.submit("receive_weights")
        self.begin()
        return receiving

    def send(self, index):
        """Signal one round to all ranks; return functions that wait until it has been copied."""
        return [rank.load_boxes(index, bucket) for rank, bucket in zip(self.ranks, self.buckets[index], strict=True)]

    def complete(self, index):
        """Send one round and wait until it has been copied."""
        for wait in self.send(index):
            wait()

    def send_all(self):
        for wait in [wait for index in range(len(self.buckets)) for wait in self.send(index)]:
            wait()
        for buffer in self.buffers:
            buffer.bytes.fill_(0xA5)  # whoever still reads it reads rubbish

    def replace_buffers(self):
        """Move the boxes to other buffers, as after a failed sync of the trainer."""
        old, self.buffers = self.buffers, [make_buffer(each.num_bytes, each.bytes.device) for each in self.buffers]
        moved = {}
        for before, buffer in zip(old, self.buffers, strict=True):
            buffer.bytes.copy_(before.bytes)
            moved[before.path] = buffer.path
        self.buckets = [
            [None if bucket is None else replace(bucket, path=moved[bucket.path]) for bucket in ranks]
            for ranks in self.buckets
        ]
        for before in old:
            before.close()

    @property
    def failures(self):
        return [rank.failure for rank in self.ranks]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (*self.ranks, *self.buffers):
            each.close()


def send_rounds(engine, rounds, device="cpu"):
    """Send boxes in an open update: [round][TP rank], None for a rank without boxes in a round."""
    with Senders(engine, rounds, device) as senders:
        senders.prepare()
        receiving = senders.receive()
        senders.send_all()
        assert receiving.result(HANG_SECONDS) == []
        assert senders.failures == [""] * len(senders.ranks)


def sync_boxes(engine, layouts, weights, policy_version, num_rounds=3):
    """Run a complete weight update with boxes."""
    engine.call("begin_weights")
    ranks = [boxes_of(layout, weights) for layout in layouts]
    send_rounds(engine, [[boxes[i::num_rounds] or None for boxes in ranks] for i in range(num_rounds)])
    engine.call("end_weights", policy_version)
