"""Requests that are continued elsewhere, on real engines: the same tokens, log-probabilities and versions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megarl.errors import LostEngineError
from megarl.rollout import partial_outputs
from megarl.rollout.continuation import continue_after, tokens_from
from megarl.rollout.engine import GenerationRequest, Sampling
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, sync
from tests.rollout.sglang.test_in_flight import prompts
from tests.rollout.whole_batches import NoScores, make_group_job
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

TOLERANCE = 1e-4
LONGEST_PREFIX = 64


@pytest.fixture(autouse=True)
def original_weights(engine, model_dir):
    if engine.call("health").policy_version != 0:
        sync(engine, reference.load(model_dir).state_dict(), 0)


def seeded(batch, max_new_tokens, name="request"):
    return [
        GenerationRequest(
            request_id=f"{name}-{i}",
            token_ids=tuple(prompt),
            sampling=Sampling(temperature=1.0, max_new_tokens=max_new_tokens, seed=1000 + i),
        )
        for i, prompt in enumerate(batch)
    ]


def test_requests_continued_after_any_number_of_tokens_equal_uninterrupted_ones(engine):
    """Prefill and decode round differently: log-probabilities are not bitwise equal, the sampled tokens are."""
    batch = seeded(prompts(4), max_new_tokens=96)
    whole = engine.call("generate_many", batch)
    stops = [(i, n) for i, g in enumerate(whole) for n in range(1, LONGEST_PREFIX + 1) if n < min(len(g.token_ids), 96)]
    parts = {(i, n): replace(g, token_ids=g.token_ids[:n]) for i, g in enumerate(whole) for n in range(1, 65)}
    continued = engine.call(
        "generate_many",
        [replace(continue_after(batch[i], parts[i, n]), request_id=f"{i} after {n}") for i, n in stops],
    )
    num_tokens = num_equal = 0
    for (i, n), rest in zip(stops, continued, strict=True):
        expected = tokens_from(whole[i], n)
        num = min(len(rest.token_ids), len(expected.token_ids))
        is_equal = rest.token_ids[:num] == expected.token_ids[:num]
        num_tokens += len(expected.token_ids)
        num_equal += np.count_nonzero(is_equal)
        same = np.logical_and.accumulate(is_equal)  # after another token, the rest is another completion
        assert np.abs(rest.logprobs[:num] - expected.logprobs[:num])[same].max(initial=0) <= TOLERANCE
    assert len(stops) >= 100
    assert num_equal >= 0.999 * num_tokens


def next_report(engine, batch, pending, last):
    """Return the partial outputs once they have a token more than the last ones for each request in flight."""
    while not all(p.done() for p in pending):
        report = engine.call("partial_outputs", {request.request_id: 0 for request in batch})
        before = num_tokens({request_id: last[request_id] for request_id in report.keys() & last.keys()})
        if report and num_tokens(report) >= before + len(report):
            return report
        time.sleep(0.02)
    return {}


def num_tokens(report):
    return sum(len(part.token_ids) for part in report.values())


def test_partial_outputs_are_beginnings_of_the_completions(engine, model_dir):
    """With pushes in flight: tokens, log-probabilities and versions, bit for bit."""
    batch = seeded(prompts(12), max_new_tokens=440)
    pending = [engine.submit("generate", request) for request in batch]
    reports: list[dict] = [{}]
    for version in (1, 2, 3):
        for _ in range(2):
            reports.append(next_report(engine, batch, pending, reports[-1]))
        sync(engine, reference.changed(model_dir, seed=100 + version), version)
    whole = {request.request_id: p.result(HANG_SECONDS) for request, p in zip(batch, pending, strict=True)}
    assert engine.call("partial_outputs", {request.request_id: 0 for request in batch}) == {}
    checked = [(whole[request_id], part) for report in reports for request_id, part in report.items()]
    assert len(checked) >= 12
    assert sum(len(set(part.policy_versions.tolist())) > 1 for _, part in checked) >= 1
    for generation, part in checked:
        num = len(part.token_ids)
        assert 0 < num < len(generation.token_ids)
        for name in ("token_ids", "logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(part, name), getattr(generation, name)[:num])
        assert part.finish_reason == "unfinished"


@dataclass(frozen=True)
class AsyncEngine:
    """A `GenerationEngine` of this process's event loop."""

    engine: RemoteEngine

    async def stream(self, requests):
        async def one(index, request):
            try:
                return index, await self._call("generate", request)
            except LostEngineError as error:
                return index, error

        for finished in asyncio.as_completed([one(i, request) for i, request in enumerate(requests)]):
            yield [await finished]

    async def partial_outputs(self, known):
        return await self._call("partial_outputs", known)

    async def _call(self, method, *arguments):
        return await asyncio.wrap_future(self.engine.submit(method, *arguments))


def test_group_continues_after_its_engine_is_killed(engine, spec, monkeypatch):
    monkeypatch.setattr(partial_outputs, "REPORT_SECONDS", 0.05)
    job = make_group_job(num_samples=8, max_new_tokens=480)

    async def rollout(*engines, kill=None):
        worker = RolloutWorker(
            RolloutWorkerSpec(request_timeout_seconds=UNREACHED_SECONDS), engines, NoScores(), tokenizer=None
        )
        group = asyncio.create_task(worker.rollout_group(job))
        if kill is not None:
            outputs = worker._pool.live(0).engine.partial_outputs
            while outputs.num_tokens < 50:
                await asyncio.sleep(0.02)
            kill()
        _, trajectories = await group
        return await worker.retry_counts(), trajectories

    _, expected = asyncio.run(rollout(AsyncEngine(engine)))
    lost = RemoteEngine(spec)
    try:
        lost.call("start")
        kill = lost.scheduler_processes()[0].kill
        counts, trajectories = asyncio.run(rollout(AsyncEngine(lost), AsyncEngine(engine), kill=kill))
    finally:
        lost.close()
    assert counts.num_retried >= 1
    assert counts.num_kept_tokens >= 50
    for one, other in zip(trajectories, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() <= TOLERANCE
        assert one.finish_reason == other.finish_reason
