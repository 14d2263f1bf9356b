"""An engine outside the package: what its host does with it, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import dump_config, load_resolved
from megarl.config.rollout import EngineConfig
from megarl.engines import EngineSpec, Generation, GenerationRequest, Sampling
from megarl.engines.custom_engine import CustomEngineHost, check_engine
from megarl.engines.engine import EngineUpdate
from megarl.errors import ConfigError, WeightSyncError, WorkerError
from megarl.reshard.transfer.bucket import Bucket, SharedBuffer, lay_out, slot_view
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, open_store
from tests.errors import expect_error
from tests.run.finished_groups import run_config

NAME = f"{__name__}:Counting"


def reply(token_ids: list[int], logprobs: list[float] | None = None, finish_reason: str = "stop") -> Generation:
    return Generation(
        token_ids=np.array(token_ids),
        logprobs=np.array(logprobs if logprobs is not None else [-0.5] * len(token_ids)),
        policy_versions=np.zeros(len(token_ids), np.int32),
        finish_reason=finish_reason,
    )


class Counting:
    """Replies with its only weight and the last token of the prompt; token 9 waits for `release`."""

    def __init__(self, spec: EngineSpec, *, replies: Any = None) -> None:
        self.weight, self.replies, self.release, self.is_shut_down = 0, replies, asyncio.Event(), False

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Any:
        if request.token_ids[-1] == 9:
            await self.release.wait()
        return self.replies if self.replies is not None else reply([self.weight, request.token_ids[-1]])

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self.weight = int(tensors["w"][0])
        if self.weight < 0:
            raise RuntimeError("negative weight")

    async def shutdown(self) -> None:
        self.is_shut_down = True


def request(*token_ids: int, name: str = "g-0") -> GenerationRequest:
    return GenerationRequest(request_id=name, token_ids=token_ids, sampling=Sampling(temperature=1.0, max_new_tokens=4))


def run_with(work: Callable[[CustomEngineHost, Any], Awaitable[None]], **kwargs: Any) -> None:
    """Run `work(host, engine)` with an engine of `Counting`."""

    async def main() -> None:
        host = CustomEngineHost(EngineSpec(model_path="m"), EngineConfig(type=NAME, kwargs=kwargs))
        await host.start()
        await work(host, host.engine)
        await host.shutdown()
        assert host.engine.is_shut_down  # type: ignore[attr-defined]
        assert "was shut down" in str(await host.ping())

    asyncio.run(main())


async def update(host: CustomEngineHost, weight: float, version: int, *, abort: str = "") -> None:
    """Update the engine as the trainer and the controller do."""
    store = open_store("127.0.0.1")
    commit = CommitSpec("127.0.0.1", store.port, f"update {version}", 1)
    decision = CommitDecision(commit, store)
    await host.begin_weights()
    slots, num_bytes = lay_out([("w", torch.float32, (1,))])
    with closing(SharedBuffer(num_bytes)) as buffer:
        slot_view(buffer.bytes, slots[0]).copy_(torch.tensor([weight]))
        await host.load_weights(Bucket(buffer.path, buffer.num_bytes, tuple(slots)))
    running = asyncio.ensure_future(
        host.update_weights(EngineUpdate(policy_version=version, commit=commit, receives=False))
    )
    await asyncio.sleep(0.05)
    decision.decide(abort)
    await running


def test_completions_have_the_version_that_sampled_them():
    async def work(host: CustomEngineHost, engine: Any) -> None:
        (before,) = await host.generate_many([request(5)])
        await update(host, 3.0, 7)
        (after,) = await host.generate_many([request(5)])
        assert (before.token_ids.tolist(), before.policy_versions.tolist()) == ([0, 5], [0, 0])
        assert (after.token_ids.tolist(), after.policy_versions.tolist()) == ([3, 5], [7, 7])
        assert (after.token_ids.dtype, after.logprobs.dtype) == (np.int32, np.float32)

    run_with(work)


def test_an_update_waits_for_requests_in_flight_and_holds_new_ones():
    async def work(host: CustomEngineHost, engine: Any) -> None:
        first = asyncio.ensure_future(host.generate_many([request(9)]))
        await asyncio.sleep(0)
        updating = asyncio.ensure_future(update(host, 4.0, 1))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(host.generate_many([request(5, name="g-1")]))
        await asyncio.sleep(0.05)
        assert not updating.done()
        assert not second.done()
        assert list(await host.partial_outputs({})) == ["g-0"]
        engine.release.set()
        await updating
        assert [(await each)[0].policy_versions[0] for each in (first, second)] == [0, 1]

    run_with(work)


def test_an_update_right_after_another_waits_for_the_requests_between():
    async def work(host: CustomEngineHost, engine: Any) -> None:
        await host.begin()
        held = asyncio.ensure_future(host.generate_many([request(5)]))
        await asyncio.sleep(0)
        await host.end(1)
        await host.begin()  # before the held request continues
        await asyncio.sleep(0.01)
        assert not held.done()
        await host.end(2)
        assert (await held)[0].policy_versions.tolist() == [2, 2]

    run_with(work)


def test_a_cancelled_or_repeated_request_does_not_go_on():
    async def work(host: CustomEngineHost, engine: Any) -> None:
        cancelled = asyncio.ensure_future(host.generate_many([request(9, name="a-0")]))
        repeated = asyncio.ensure_future(host.generate_many([request(9, name="b-0")]))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        again = asyncio.ensure_future(host.generate_many([request(5, name="b-0")]))
        assert [each.finish_reason for each in (*await again, *await repeated)] == ["stop", "abort"]
        assert await host.partial_outputs({}) == {}

    run_with(work)


def test_aborted_requests_end_without_tokens():
    async def work(host: CustomEngineHost, engine: Any) -> None:
        running = asyncio.ensure_future(host.generate_many([request(9, name=f"g-{i}") for i in range(3)]))
        await asyncio.sleep(0.01)
        await host.abort("g-1")
        await host.abort("unknown")
        await host.abort_groups(["g"])
        ended = await running
        assert [(each.finish_reason, len(each.token_ids)) for each in ended] == [("abort", 0)] * 3

    run_with(work)


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ("text", "needs to return a Generation, got str"),
        (reply([1, 2], [-0.5]), r"one log-probability per token, got shapes \(2,\) and \(1,\)"),
        (reply([1] * 5), "returned 5 tokens, but at most 4 were asked for"),
        (reply([1], [float("nan")]), "a log-probability that is not a finite number of at most 0"),
        (reply([1], [0.5]), "a log-probability that is not a finite number of at most 0"),
        (reply([1], finish_reason="done"), "finish_reason needs to be stop or length, got 'done'"),
    ],
)
def test_wrong_completions_fail_their_request(replies, problem):
    async def work(host: CustomEngineHost, engine: Any) -> None:
        with pytest.raises(WorkerError, match=problem):
            await host.generate_many([request(5)])

    run_with(work, replies=replies)


def test_after_a_failed_update_the_engine_needs_another_one():
    async def work(host: CustomEngineHost, engine: Any) -> None:
        with expect_error(WeightSyncError, "load_weights", "RuntimeError"):
            await update(host, -1.0, 1)
        with expect_error(WeightSyncError, "complete", "generate"):
            await host.generate_many([request(5)])
        with expect_error(WeightSyncError, "aborted", "another"):
            await update(host, 1.0, 2, abort="another engine was lost")
        await update(host, 2.0, 3)
        (found,) = await host.generate_many([request(5)])
        assert (found.token_ids[0], found.policy_versions[0]) == (2, 3)

    run_with(work)


class Plain:
    def start(self) -> None: ...


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"type": "tests.engines.absent:Engine"}, r"rollout.engine.type: cannot import tests.engines.absent"),
        ({"type": f"{__name__}:reply"}, "needs a class, got .*:reply, a function"),
        ({"type": f"{__name__}:Plain"}, r"Plain\.start needs to be an async method"),
        ({"type": NAME, "kwargs": {"speed": 1}}, "does not take a spec and these arguments: .*'speed'"),
    ],
)
def test_classes_that_cannot_be_engines_are_refused(engine, problem):
    with pytest.raises(ConfigError, match=problem):
        check_engine(EngineConfig.model_validate(engine))


def test_the_file_of_a_run_with_a_custom_engine_can_be_read(tmp_path):
    """A run that resumes, and a replay, read the configuration with its defaults."""
    config = run_config({"type": "grpo"}, rollout={"engine": {"type": NAME}}, weight_sync={"strategy": "gather_hf"})
    (tmp_path / "train.yaml").write_text(dump_config(config))
    assert load_resolved(tmp_path / "train.yaml") == config


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"rollout": {"engine": {"type": "vllm"}}}, "needs to be sglang or package.module:Class, got 'vllm'"),
        ({"rollout": {"engine": {"kwargs": {"a": 1}}}}, "kwargs are those of an engine outside the package"),
        ({"rollout": {"engine": {"type": NAME, "mem_fraction": 0.5}}}, "mem_fraction is an option of SGLang"),
        ({"rollout": {"engine": {"type": NAME}}}, "weight_sync.strategy: needs gather_hf, got auto"),
        (
            {
                "rollout": {"engine": {"type": NAME}},
                "weight_sync": {"strategy": "gather_hf"},
                "schedule": {"type": "async", "update": "in_place"},
            },
            "schedule.update: needs drain, got in_place",
        ),
    ],
)
def test_settings_that_a_custom_engine_cannot_have_are_refused(sections, problem):
    with pytest.raises(ValueError, match=problem):
        run_config({"type": "grpo"}, **sections)
