"""The jobs of a schedule's groups: prompts by ordinal, request ids, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.data.sampler import RowOrder
from megarl.rollout.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob
from megarl.schedule.events import OpenGroup
from megarl.schedule.schedule import place


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJobs:
    """Makes the job of any group of a run, the same one each time."""

    config: RunConfig
    prompts: Sequence[Prompt]
    order: RowOrder
    first: int
    """Ordinal, in the order of the prompts, of the schedule's first group; others came before in a warm-up."""
    sampling: Sampling

    def job(self, group: OpenGroup) -> GroupJob:
        """Return the job of a group; ids and seeds are those of the same prompt in a synchronous run.

        A group that is sampled again has another id: the journal may have samples of other weights under the first one.
        """
        algorithm = self.config.algorithm
        step, index = place(group.ordinal, algorithm.prompts_per_step)
        again = f"-again{group.attempt}" if group.attempt else ""
        prompt = self.prompts[self.order.row_at(self.first + group.ordinal)]
        return GroupJob(
            prompt=prompt,
            group_id=index,
            num_samples=algorithm.group_size,
            sampling=self.sampling.within(prompt.max_new_tokens),
            request_id=f"step-{step}{again}-{index}",
            seed=(self.config.seed, step),
            has_baseline=algorithm.needs_greedy_baseline,
        )
