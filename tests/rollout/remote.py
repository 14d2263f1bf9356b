"""Test client of an engine in a separate process, because SGLang may end the process that hosts it."""

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from multiprocessing.connection import Listener
from pathlib import Path

import psutil

from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, SharedBuffer, dtype_name, lay_out
from megarl.rollout.engine import GenerationRequest, Sampling
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.engine_environment import make_engine_environment

CALL_SECONDS = 120


class RemoteEngine:
    def __init__(self, spec: EngineSpec):
        self.folder = tempfile.TemporaryDirectory(prefix="megarl-test-")
        address = f"{self.folder.name}/socket"
        listener = Listener(address, authkey=b"tests")
        environment = os.environ | make_engine_environment(spec.device, spec.tp) | {"OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("engine_process.py")
        self.process = subprocess.Popen([sys.executable, "-P", str(script), address], env=environment)
        self.connection = listener.accept()
        self.connection.send(spec)
        self.futures: dict[int, Future] = {}
        self.numbers = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, method, *args) -> Future:
        number, future = next(self.numbers), Future()
        self.futures[number] = future
        self.connection.send((number, method, args))
        return future

    def call(self, method, *args):
        return self.submit(method, *args).result(CALL_SECONDS)

    def generate(self, prompts, **sampling):
        return self.call("generate_many", requests(prompts, **sampling))

    def scheduler_processes(self):
        return [psutil.Process(pid) for pid in self.call("health").scheduler_pids]

    def close(self):
        if self.process.poll() is None:
            self.connection.send(None)
        try:
            self.process.wait(30)
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
    engine.call("begin_weights")
    names = list(weights)
    for i in range(num_buckets):
        send_bucket(engine, {name: weights[name] for name in names[i::num_buckets]})
    engine.call("end_weights", policy_version)


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


def send_round(engine, index, per_rank):
    """Send one round, each rank's boxes in a separate call; None for a rank without boxes."""
    buffers, calls = [], []
    try:
        for rank, boxes in enumerate(per_rank):
            bucket = None
            if boxes is not None:
                buffer, bucket = box_bucket(boxes)
                buffers.append(buffer)
            calls.append(engine.submit("load_boxes", rank, index, bucket))
        errors = [call.exception(CALL_SECONDS) for call in calls]
        for buffer in buffers:
            buffer.bytes.fill_(0xA5)  # whoever still reads it reads rubbish
    finally:
        for buffer in buffers:
            buffer.close()
    for error in errors:
        if error is not None:
            raise error


def sync_boxes(engine, layouts, weights, policy_version, num_rounds=3):
    """Run a complete weight update with boxes."""
    engine.call("begin_weights")
    ranks = [boxes_of(layout, weights) for layout in layouts]
    for i in range(num_rounds):
        send_round(engine, i, [boxes[i::num_rounds] or None for boxes in ranks])
    engine.call("end_weights", policy_version)
