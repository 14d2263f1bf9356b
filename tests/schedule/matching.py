"""Feasibility of deadlines by bipartite matching and brute force, without the inequality that the schedule checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def can_match(deadlines: Sequence[int], step: int, groups_per_step: int) -> bool:
    """Return whether each group can be given a place of its own in one of the steps from `step` to its deadline."""
    owner: dict[tuple[int, int], int] = {}

    def find_place(group: int, visited: set[tuple[int, int]]) -> bool:
        for x in range(step, deadlines[group] + 1):
            for place in range(groups_per_step):
                if (x, place) in visited:
                    continue
                visited.add((x, place))
                if (x, place) not in owner or find_place(owner[x, place], visited):
                    owner[x, place] = group
                    return True
        return False

    return all(find_place(group, set()) for group in range(len(deadlines)))


def can_take_some_batch(groups: Sequence[tuple[int, bool]], step: int, groups_per_step: int) -> bool:
    """Return whether some batch of finished groups leaves all other groups a place in time.

    Args:
        groups: (deadline, is finished) of each open group.
    """
    finished = [i for i, (_, is_finished) in enumerate(groups) if is_finished]
    for batch in combinations(finished, groups_per_step):
        others = [deadline for i, (deadline, _) in enumerate(groups) if i not in batch]
        if can_match(others, step + 1, groups_per_step):
            return True
    return False
