"""Hosts one SglangEngine for the tests and calls its methods on request over a socket.

Run as `python engine_process.py <socket>`; the first message is the EngineSpec, the last one is None. If the engine has
several nodes, the process of its first node starts a process for each of the others, which hosts the part of that node.
"""

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client

from megarl.engines.sglang.engine_host import EngineHost
from megarl.engines.sglang.sglang_engine import SglangEngine
from megarl.errors import LostEngineError
from tests.engines.remote import RemoteEngine
from tests.rollout.clock import iterate, jump, run_in_event_loop
from tests.time_limits import UNREACHED_SECONDS, wait_for


class TestableEngine(SglangEngine):
    async def receive_weights(self, delta=None):
        """Receive the boxes of all TP ranks: one step of `update_weights`."""
        return await self._weights.receive(delta)

    async def end_weights(self, policy_version):
        """Set the policy version and resume decoding: the last step of `update_weights`."""
        await self._weights.end(policy_version)

    async def set_holds_requests(self, holds_requests):
        """Choose whether requests wait while memory is released."""
        self._spec = replace(self._spec, holds_requests=holds_requests)

    async def set_pause_mode(self, pause_mode):
        """Choose what happens to requests in flight when the engine pauses."""
        self._weights.calls.pause_mode = pause_mode

    async def set_round_seconds(self, seconds):
        """Choose how long the TP ranks wait for the next round of boxes."""
        self._weights.sync_seconds = seconds

    async def pass_time_limit(self, what):
        """Wait until SGLang is to answer a call of this name; then let more time pass than the host waits for it."""
        calls = self._weights.calls
        await wait_for(lambda: calls.pending is not None and calls.pending.get_name() == what)
        await iterate()
        jump(3 * UNREACHED_SECONDS)

    async def num_attempts(self):
        """Return how many requests SGLang has received."""
        return self._requests.num_attempts

    async def randomize_weights(self):
        """Overwrite every parameter and buffer with noise, to show that a weight update replaces all of it."""
        await self._host.call(self._randomize())

    async def _randomize(self):
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        check = CheckWeightsReqInput(action="reset_tensors")
        ok, message, *_ = await self._host.tokenizer_manager.check_weights(check)
        assert ok, message


class ProcessNode:
    """Another node of the engine, faked by a process on this machine."""

    def __init__(self, spec):
        self.spec, self.name, self.process = spec, spec.node_name, None

    async def start(self, dist_init_addr):
        self.process = await asyncio.to_thread(RemoteEngine, replace(self.spec, dist_init_addr=dist_init_addr))
        await self._call("start")

    async def ask(self, method, *args):
        return await self._call(method.__name__, *args)

    async def shutdown(self):
        if self.process is not None:
            await self._call("shutdown")
            await asyncio.to_thread(self.process.close)

    async def _call(self, method, *args):
        try:
            return await asyncio.wrap_future(self.process.submit(method, *args))
        except (EOFError, OSError) as e:
            raise LostEngineError(f"the engine's host on {self.name} died") from e


def make_engine(spec):
    if spec.node_rank > 0:
        return EngineHost(spec)
    others = [replace(spec, node_rank=rank, node_name=f"node{rank}") for rank in range(1, spec.nnodes)]
    return TestableEngine(spec, list(map(ProcessNode, others)))


async def answer(engine, connection, number, method, args):
    try:
        reply = (number, True, await getattr(engine, method)(*args))
    except Exception as e:  # noqa: BLE001 -- raised again in the test
        reply = (number, False, e)
    connection.send(reply)


async def main(address):
    connection = Client(address, authkey=b"tests")
    engine, calls = make_engine(connection.recv()), set()
    with suppress(EOFError):
        while (message := await asyncio.to_thread(connection.recv)) is not None:
            calls.add(asyncio.create_task(answer(engine, connection, *message)))
    await engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    run_in_event_loop(main(sys.argv[1]))
