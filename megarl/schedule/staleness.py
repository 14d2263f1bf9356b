"""Versions of tokens, and the staleness of those of a step: how many versions older than the weights that train."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


def version_of(label: int, skipped: AbstractSet[int]) -> int:
    """Return the newest version with the weights that the engines label `label`.

    Args:
        skipped: versions without an update of their own: their weights and label are those of the version before.

    >>> version_of(2, {3, 4}), label_of(4, {3, 4})
    (4, 2)
    """
    while label + 1 in skipped:
        label += 1
    return label


def label_of(version: int, skipped: AbstractSet[int]) -> int:
    """Return the label of the tokens that engines sample with a version; the inverse of `version_of`."""
    while version in skipped:
        version -= 1
    return version


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStaleness:
    """Staleness of the sampled tokens of one step.

    >>> tokens = token_staleness(step=6, num_tokens_by_version={5: 70, 4: 20, 2: 10}, max_staleness=2)
    >>> tokens.mean, tokens.worst, tokens.masked_fraction
    (0.2222222222222222, 1, 0.1)
    """

    num_tokens: Mapping[int, int]
    """Staleness -> number of tokens trained on, in ascending order."""
    num_masked: int
    """Number of tokens above the cap, which are not trained on."""

    @property
    def num_trained(self) -> int:
        """Number of tokens trained on."""
        return sum(self.num_tokens.values())

    @property
    def mean(self) -> float:
        """Mean over the tokens trained on; 0 without any."""
        return sum(staleness * num for staleness, num in self.num_tokens.items()) / max(1, self.num_trained)

    @property
    def worst(self) -> int:
        """Largest staleness of a token trained on; 0 without any."""
        return max(self.num_tokens, default=0)

    @property
    def masked_fraction(self) -> float:
        """Share of the tokens that are above the cap."""
        return self.num_masked / max(1, self.num_trained + self.num_masked)

    def metrics(self) -> dict[str, float]:
        """Return mean, maximum, share of masked tokens, and the share of the trained tokens of each staleness."""
        shares = {f"staleness/share_{s}": num / self.num_trained for s, num in self.num_tokens.items()}
        return {
            "staleness/mean": self.mean,
            "staleness/max": self.worst,
            "staleness/masked": self.masked_fraction,
            **shares,
        }


def token_staleness(step: int, num_tokens_by_version: Mapping[int, int], max_staleness: int) -> TokenStaleness:
    """Return the staleness of tokens that step `step` trains on; the weights before its update are version step - 1.

    Args:
        num_tokens_by_version: version that sampled the tokens -> number of tokens.
        max_staleness: tokens above it are counted as masked.
    """
    by_staleness = {step - 1 - version: num for version, num in num_tokens_by_version.items()}
    trained = {staleness: num for staleness, num in sorted(by_staleness.items()) if staleness <= max_staleness}
    return TokenStaleness(num_tokens=trained, num_masked=sum(by_staleness.values()) - sum(trained.values()))
