"""Pings of the engine host, which distinguish a hung engine from a busy one."""

import asyncio
from types import SimpleNamespace

import pytest

from megarl.rollout.sglang import engine_host
from megarl.rollout.sglang.engine_host import EngineHost
from tests.rollout.clock import LOOP_CLOCK, in_virtual_time


class FakeTokenizerManager:
    """Replaces SGLang's tokenizer manager: schedulers reply once `gate` is set."""

    def __init__(self):
        self.gate, self.num_pings = asyncio.Event(), 0

    async def get_internal_state(self):
        self.num_pings += 1
        await self.gate.wait()


@pytest.fixture
def host(monkeypatch):
    """An engine host whose two schedulers have used `spent` seconds of CPU time."""
    monkeypatch.setattr(engine_host, "time", LOOP_CLOCK)
    host = EngineHost(SimpleNamespace(log_dir=None))
    host._engine = SimpleNamespace(tokenizer_manager=FakeTokenizerManager())
    host.spent = [1.0, 1.0]

    async def processor_seconds():
        return list(host.spent)

    monkeypatch.setattr(host, "processor_seconds", processor_seconds)
    return host


async def ping_returns(host, seconds=60):
    ping = asyncio.create_task(host._ping())
    done, _ = await asyncio.wait([ping], timeout=seconds)
    ping.cancel()
    return bool(done)


@in_virtual_time
async def test_ping_returns_once_the_schedulers_reply(host):
    host.tokenizer_manager.gate.set()
    assert await ping_returns(host)


@in_virtual_time
async def test_ping_returns_if_all_schedulers_use_cpu_time(host):
    ping = asyncio.create_task(host._ping())
    await asyncio.sleep(5)
    host.spent = [2.0, 1.0]
    await asyncio.sleep(5)
    assert not ping.done()
    host.spent = [2.0, 1.5]
    await ping


@in_virtual_time
async def test_ping_does_not_return_for_a_hung_engine_and_is_sent_once(host):
    assert not await ping_returns(host)
    assert not await ping_returns(host)
    assert host.tokenizer_manager.num_pings == 1
    host.tokenizer_manager.gate.set()
    assert await ping_returns(host)


@in_virtual_time
async def test_cpu_time_counts_only_for_max_busy_seconds(host):
    async def spin():
        while True:
            host.spent = [spent + 1 for spent in host.spent]
            await asyncio.sleep(engine_host.PING_POLL_SECONDS / 2)

    spinning = asyncio.create_task(spin())
    assert await ping_returns(host)
    await asyncio.sleep(engine_host.MAX_BUSY_SECONDS)
    assert not await ping_returns(host)
    host.tokenizer_manager.gate.set()
    assert await ping_returns(host)
    host.tokenizer_manager.gate.clear()
    assert await ping_returns(host)  # a second ping
    spinning.cancel()
