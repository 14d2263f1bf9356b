"""Hosts one SglangEngine for the tests and calls its methods on request over a socket.

Run as `python engine_process.py <socket>`; the first message is the EngineSpec, the last one is None.
"""

import asyncio
import os
import sys
from multiprocessing.connection import Client

from megarl.rollout.sglang.sglang_engine import SglangEngine


class TestableEngine(SglangEngine):
    async def randomize_weights(self):
        """Overwrite every parameter and buffer with noise, to show that a weight update replaces all of it."""
        await self._host.call(self._randomize())

    async def _randomize(self):
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        check = CheckWeightsReqInput(action="reset_tensors")
        ok, message, *_ = await self._host.tokenizer_manager.check_weights(check)
        assert ok, message


async def answer(engine, connection, number, method, args):
    try:
        reply = (number, True, await getattr(engine, method)(*args))
    except Exception as e:  # noqa: BLE001 -- raised again in the test
        reply = (number, False, e)
    connection.send(reply)


async def main(address):
    connection = Client(address, authkey=b"tests")
    engine = TestableEngine(connection.recv())
    calls = set()
    while (message := await asyncio.to_thread(receive, connection)) is not None:
        calls.add(asyncio.create_task(answer(engine, connection, *message)))
    await engine.shutdown()
    os._exit(0)


def receive(connection):
    try:
        return connection.recv()
    except EOFError:
        return None


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
