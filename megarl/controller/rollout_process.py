"""A rollout worker with everything it needs in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.reward.scorer import RewardScorer
from megarl.rollout.engine import GenerationEngine
from megarl.rollout.worker import RolloutWorker, RolloutWorkerSpec
from megarl.tracking.rollout_log import write_rollouts


class RolloutProcess(RolloutWorker):
    """Runs agents, scores trajectories, and writes them down."""

    def __init__(self, config: RunConfig, engines: Sequence[GenerationEngine]) -> None:
        spec = RolloutWorkerSpec(request_timeout_seconds=config.rollout.request_timeout_seconds)
        super().__init__(spec, engines, RewardScorer.from_model(config.reward, config.model.path))
        tokenizer = load_tokenizer(config.model.path)
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._folder = Path(config.run_dir) / "rollouts"

    async def record(self, step: int, advantages: Sequence[float], *groups: Sequence[Trajectory]) -> None:
        """Write the groups' trajectories, `advantages` in the same order, to `rollouts/step-<step>.parquet`."""
        trajectories = [trajectory for group in groups for trajectory in group]
        path = self._folder / f"step-{step:06d}.parquet"
        await asyncio.to_thread(write_rollouts, path, trajectories, advantages, step=step, decode=self._decode)
