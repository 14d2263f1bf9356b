"""A reward for the demo's word problems that compares the completions of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl import Trajectory


class ShortestAnswer:
    """1 for a correct answer, and a bonus for the shortest correct answers of the group."""

    def __init__(self, bonus: float = 0.2) -> None:
        """Open here what calls share, such as the connection to a judge; `close` releases it."""
        self.bonus = bonus

    def score(
        self, trajectories: Sequence[Trajectory], texts: Sequence[str], row: Mapping[str, str]
    ) -> list[dict[str, float]]:
        """Return one result per completion. `reward` is the reward, all other keys are only logged."""
        correct = [text.endswith(f"#### {row['answer']}") for text in texts]
        shortest = min((len(text) for text, is_correct in zip(texts, correct, strict=True) if is_correct), default=0)
        best = [is_correct and len(text) == shortest for text, is_correct in zip(texts, correct, strict=True)]
        return [
            {"reward": is_correct + self.bonus * is_best, "correct": is_correct, "characters": len(text)}
            for text, is_correct, is_best in zip(texts, correct, best, strict=True)
        ]

    def close(self) -> None:
        """Nothing to release here."""
