"""An engine that replies in text, environments that fail in chosen ways, and a worker that runs them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.batch.trajectory import Prompt, ScoredGroup, Trajectory
from megarl.config.data import DataConfig
from megarl.config.rollout import EnvironmentConfig
from megarl.engines.engine import Generation, GenerationRequest
from megarl.rollout.environments.environment import Step, Task
from megarl.rollout.environments.environment_agent import EnvironmentAgent
from megarl.rollout.rollout_worker import GroupJob, RolloutWorker, RolloutWorkerSpec, Scorer
from tests.rollout.whole_batches import WholeBatches, make_generation, make_group_job


@dataclass
class TextEngine(WholeBatches):
    """Replies with `reply(prompt text, request id)` and the stop token, after `seconds`."""

    tokenizer: Any
    reply: Callable[[str, str], str]
    seconds: float = 0.0
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        text = self.reply(self.tokenizer.decode(request.token_ids), request.request_id)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        taken = ids[: request.sampling.max_new_tokens]
        return make_generation(taken, reason="stop" if len(taken) == len(ids) else "length")


class TurnScorer:
    """Rewards the sum of the rewards of turns."""

    async def score(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> ScoredGroup:
        sums = [float(sum(t.turn_rewards)) for t in trajectories]
        pairs = zip(trajectories, sums, strict=True)
        return ScoredGroup(trajectories=[replace(t, rewards={"game": total}) for t, total in pairs])

    async def close(self) -> None:
        pass


open_environments: set["Echo"] = set()
"""The environments that are not closed."""


class Echo:
    """Answers each reply with its length; 0.25 for each turn, and 1 for the reply `done`, which ends the episode."""

    def __init__(self, *, calls: int = 0) -> None:
        self.calls = calls
        open_environments.add(self)

    async def reset(self, task: Task) -> None:
        assert task.messages == [{"role": "user", "content": task.prompt.row["prompt"]}]

    async def step(self, reply: str) -> Step:
        if reply == "done":
            return Step(reward=1.0, done=True)
        message = {"role": "tool", "content": str(len(reply))}
        return Step(messages=[message], reward=0.25, num_calls=self.calls)

    async def close(self) -> None:
        open_environments.remove(self)


def make_prompt(tokenizer: Any, number: int = 1, text: str = "is it?", **row: Any) -> Prompt:
    """Return the prompt of a row; `row` has further fields."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids, row = tuple(tokenizer.encode(rendered)), {"prompt": text, "answer": "7", **row}
    return Prompt(prompt_id=f"d.jsonl:{number}", text=rendered, token_ids=token_ids, row=row, answer="7")


def make_task(answer: str | None, row: dict[str, Any] | None = None, shared: dict[str, Any] | None = None) -> Task:
    """Return a task for an environment without a policy."""
    prompt = Prompt(prompt_id="p:1", text="", token_ids=(), row=row or {}, answer=answer)
    messages = [{"role": "user", "content": "?"}]
    return Task(prompt=prompt, messages=messages, seed=1, shared={} if shared is None else shared)


def make_worker(
    engine: TextEngine, environment: type, *, scorer: Scorer | None = None, limit: float = 1e6, **config: Any
) -> RolloutWorker:
    """Return a worker whose agent runs the environment, with further fields of `rollout.env`; see `TurnScorer`.

    Args:
        limit: `rollout.request_timeout_seconds`.
    """
    section = EnvironmentConfig(path=f"{environment.__module__}:{environment.__name__}", **config)
    agent = EnvironmentAgent(section, DataConfig(path="d.jsonl"), engine.tokenizer)
    names = {"agent_path": section.path, "agent_key": "rollout.env.path"}
    spec = RolloutWorkerSpec(request_timeout_seconds=limit, agent=agent, **names)
    return RolloutWorker(spec, [engine], scorer or TurnScorer(), tokenizer=engine.tokenizer)


def make_job(tokenizer: Any, *, number: int = 1, **changes: Any) -> GroupJob:
    prompt = make_prompt(tokenizer, number=number)
    return make_group_job(prompt, group_id=number, **{"max_new_tokens": 200, **changes})
