"""An engine whose samples depend on prompt and seed alone, and workers that run a harness or sample directly."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.data import DataConfig
from megarl.config.rollout import HarnessConfig
from megarl.engines.engine import Generation, GenerationRequest, Sampling
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.gateway.harness_agent import HarnessAgent
from megarl.rollout.gateway.reply_parser import PlainTextParser, ReplyParser
from megarl.rollout.gateway.session import Session
from megarl.rollout.rollout_worker import GroupSummary, RolloutWorker, RolloutWorkerSpec
from tests.rollout.clock import iterate, run_in_event_loop
from tests.rollout.environments.chat_templates import DAY
from tests.rollout.environments.scripted import TurnScorer, make_prompt
from tests.rollout.whole_batches import WholeBatches, make_generation, make_group_job, token_routes, with_routes
from tests.time_limits import UNREACHED_SECONDS


@dataclass
class SeededEngine(WholeBatches):
    """Samples random tokens and the stop token, or `reply(prompt text)`; keeps a log of all requests and completions.

    Random tokens of a byte-level tokenizer are seldom UTF-8: their text is encoded to other tokens.
    """

    tokenizer: Any
    reply: Callable[[str], str] | None = None
    in_letters: bool = False
    """Whether a reply consists of the tokens of its letters, which its text is not encoded to."""
    log: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Generation:
        rng = np.random.default_rng([*request.token_ids, request.sampling.seed or 0])
        if self.reply is None:
            ids = rng.integers(2, len(self.tokenizer) - 1, size=rng.integers(1, 13)).tolist()
            ids = [token for token in ids if token not in self.tokenizer.all_special_ids] or [5]
        else:
            text = self.reply(self.tokenizer.decode(request.token_ids))
            parts = text if self.in_letters else [text]
            ids = [token for part in parts for token in self.tokenizer.encode(part, add_special_tokens=False)]
        ids = [*ids, self.tokenizer.eos_token_id]
        taken = ids[: request.sampling.max_new_tokens]
        logprobs, versions = -rng.random(len(taken), np.float32), rng.integers(0, 3, len(taken), np.int32)
        generation = make_generation(taken, logprobs, versions, "stop" if len(taken) == len(ids) else "length")
        generation = with_routes(generation, request)
        self.log.append((request, generation))
        return generation


def make_agent(
    tokenizer: Any, function: Any = None, *, parser: ReplyParser | None = None, **config: Any
) -> HarnessAgent:
    """Return an agent that runs the function, which needs to be importable, or `command`."""
    if function is not None:
        config["path"] = f"{function.__module__}:{function.__qualname__}"
    needs_reward, data = config.pop("needs_reward", False), config.pop("data", {})
    section = HarnessConfig(**{"max_seconds": UNREACHED_SECONDS, **config})
    data = DataConfig.model_validate({"path": "d.jsonl", **data})
    return HarnessAgent(section, data, tokenizer, needs_reward=needs_reward, parser=parser)


Groups = list[tuple[GroupSummary, list[Trajectory]]]


def run_groups(
    engine: Any,
    agent: Any,
    prompts: Sequence[Prompt],
    *,
    seconds: float = 1e9,
    no_progress_seconds: float = 1e9,
    **changes: Any,
) -> Groups:
    """Return the groups of all prompts, which run at the same time, each with the seed of its number.

    Args:
        seconds: time limit of an episode.
        no_progress_seconds: that of the engine.
        changes: further fields of the jobs, such as `num_samples`, which is 1.
    """

    async def main() -> Groups:
        spec = RolloutWorkerSpec(
            request_timeout_seconds=seconds,
            no_progress_seconds=no_progress_seconds,
            agent=agent,
            agent_path="the agent",
        )
        worker = RolloutWorker(spec, [engine], TurnScorer(), tokenizer=engine.tokenizer)
        fields = {"num_samples": 1, **changes}
        jobs = [make_group_job(each, group_id=number, **fields) for number, each in enumerate(prompts)]
        try:
            groups = list(await asyncio.gather(*map(worker.rollout_group, jobs)))
            if isinstance(engine, SeededEngine):
                assert_routes([trajectory for _, trajectories in groups for trajectory in trajectories])
            return groups
        finally:
            await iterate(5)
            assert not getattr(engine, "in_flight", {}), "requests are in flight after the episodes"
            if hasattr(agent, "close"):
                await agent.close()

    return run_in_event_loop(main())


def assert_routes(trajectories: Sequence[Trajectory]) -> None:
    """Check that the tokens before the last sampled one have the routes that the engine has returned for them."""
    for trajectory in trajectories:
        sampled = np.flatnonzero(trajectory.loss_mask)
        if len(sampled):
            assert trajectory.routes is not None
            last, want = int(sampled[-1]), token_routes(trajectory.token_ids)
            assert np.array_equal(trajectory.routes[:last], want[:last])
            is_known = (trajectory.routes == want).all(axis=(1, 2))
            assert not trajectory.routes[~is_known].any()


def make_session(engine: SeededEngine, number: int) -> Session:
    """Return the session of an episode that no server serves."""
    tokenizer = engine.tokenizer
    sampling = Sampling(temperature=1.0, max_new_tokens=1000, seed=number)
    episode = Episode(make_prompt(tokenizer), tokenizer, engine, sampling, request_id=f"r-{number}", group_id=0)
    config = HarnessConfig(path="a:b", max_seconds=1e6)
    return Session(episode, config, ChatRenderer(tokenizer, DAY), PlainTextParser(), can_call=False)


def sampled_ids(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Return the runs of trained tokens of all trajectories, sorted."""
    runs = []
    for each in trajectories:
        edges = np.flatnonzero(np.diff(each.loss_mask, prepend=False, append=False))
        runs += [each.token_ids[start:end].tolist() for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return sorted(runs)


def logged_ids(engine: SeededEngine) -> list[list[int]]:
    """Return the completions of the engine, sorted."""
    return sorted(generation.token_ids.tolist() for _, generation in engine.log)
