"""Conversations through the gateway with an SGLang engine: bitwise those of direct sampling with the same seeds."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.engine import Generation, GenerationRequest
from megarl.engines.engine_spec import EngineSpec
from megarl.model_files.model_config import read_stop_token_ids
from megarl.rollout.environments.environment import Task
from tests.engines.remote import RemoteEngine, started
from tests.rollout.clock import ENGINE_LIMITS
from tests.rollout.gateway.clients import KINDS, ask_raw, talk
from tests.rollout.gateway.scripted import make_agent, make_prompt, run_groups
from tests.rollout.gateway.test_tokens import sample_directly
from tests.rollout.whole_batches import WholeBatches
from tests.time_limits import wait_for

TURN_TOKENS = 16


class Engine(WholeBatches):
    """Calls the engine's process from threads, one request at a time."""

    def __init__(self, remote: RemoteEngine, tokenizer: Any) -> None:
        self.remote, self.tokenizer = remote, tokenizer
        self.lock = asyncio.Lock()
        self.finish_reasons: list[str] = []
        """Of the requests that were answered, in the order of the answers."""
        self.stopped: psutil.Process | None = None
        """A scheduler that is stopped until a request is aborted."""

    async def generate(self, request: GenerationRequest) -> Generation:
        async with self.lock:
            found: Generation = await asyncio.to_thread(self.remote.call, "generate", request)
        self.finish_reasons.append(found.finish_reason)
        return found

    async def abort(self, request_id: str) -> None:
        await asyncio.to_thread(self.remote.call, "abort", request_id)
        if self.stopped is not None:
            self.stopped.resume()
        async with self.lock:  # its request has been answered
            pass


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RemoteEngine, Any]]:
    folder = tmp_path_factory.mktemp("models") / "chat"
    write_tiny_model(folder, ["some text"] * 3, seed=0, chat=True)
    stop = read_stop_token_ids(str(folder))
    limits = {"max_total_tokens": 8192, "stop_token_ids": stop, **ENGINE_LIMITS}
    with started(EngineSpec(model_path=str(folder), deterministic=True), **limits) as engine:
        yield engine, load_tokenizer(str(folder))


def test_the_gateway_samples_as_direct_sampling(remote: tuple[RemoteEngine, Any]) -> None:
    engine, tokenizer = remote
    prompts = [make_prompt(tokenizer, n, turns=1 + n % 4, turn_tokens=TURN_TOKENS) for n in range(len(KINDS))]
    expected = run_groups(Engine(engine, tokenizer), sample_directly, prompts, max_new_tokens=300)
    agent = make_agent(tokenizer, talk, kwargs={"kinds": list(KINDS)}, max_turn_tokens=TURN_TOKENS)
    served = run_groups(Engine(engine, tokenizer), agent, prompts, max_new_tokens=300)
    for (_, (direct,)), (_, (got,)) in zip(expected, served, strict=True):
        np.testing.assert_array_equal(got.token_ids, direct.token_ids)
        np.testing.assert_array_equal(got.loss_mask, direct.loss_mask)
        assert got.logprobs.tobytes() == direct.logprobs.tobytes()
        assert got.logprobs[got.loss_mask].min() < -1.0


engines: list[Engine] = []


async def leave_a_request(task: Task, base_url: str, api_key: str) -> None:
    """Return once the engine has the request, which it has not sampled by then."""
    asked = asyncio.ensure_future(ask_raw(base_url, api_key, list(task.messages)))
    await wait_for(engines[-1].lock.locked)
    asked.cancel()


def test_a_request_that_a_program_has_left_ends_in_the_engine(remote: tuple[RemoteEngine, Any]) -> None:
    engine, tokenizer = remote
    ours = Engine(engine, tokenizer)
    engines.append(ours)
    (ours.stopped,) = engine.scheduler_processes()
    ours.stopped.suspend()
    run_groups(ours, make_agent(tokenizer, leave_a_request), [make_prompt(tokenizer)], max_new_tokens=480)
    assert ours.finish_reasons == ["abort"]
    assert engine.call("health").num_requests == 0
