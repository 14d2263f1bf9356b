"""A two-turn agent for the demo's word problems: the policy answers, reads the problem again, and answers once more."""

from __future__ import annotations

from megarl import Episode, Trajectory


async def run(episode: Episode, *, tokens_per_turn: int, hint: str = "") -> Trajectory:
    """Return the trajectory of both turns: both answers are trained on, the text between them is not."""
    await episode.generate(max_new_tokens=tokens_per_turn)
    episode.observe(f"\n{hint}{episode.prompt.text}")
    await episode.generate(max_new_tokens=tokens_per_turn)
    return episode.trajectory()
