"""Agents: functions that turn an episode's prompt into a trajectory, with an engine that samples for them.

from megarl import Episode, Trajectory


async def answer_twice(episode: Episode) -> Trajectory:
await episode.generate()
return episode.trajectory()
"""

from typing import TYPE_CHECKING

from megarl.lazy_names import lazy_names

if TYPE_CHECKING:
    from megarl.engines.engine import Generation as Generation
    from megarl.rollout.agents.agent import Agent as Agent
    from megarl.rollout.agents.episode import Episode as Episode
    from megarl.rollout.agents.episode import RefusedTextError as RefusedTextError

__all__ = [
    "Agent",
    "Episode",
    "Generation",
    "RefusedTextError",
]

__getattr__ = lazy_names(
    __name__,
    {
        "megarl.engines.engine": ("Generation",),
        "megarl.rollout.agents.agent": ("Agent",),
        "megarl.rollout.agents.episode": (
            "Episode",
            "RefusedTextError",
        ),
    },
)
