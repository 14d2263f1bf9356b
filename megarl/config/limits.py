from __future__ import annotations

from pydantic import Field

from megarl.config.section import Section


class LimitsConfig(Section):
    """Watched quantities; a step that passes one ends the run with exit code 3."""

    logprob_abs_max: float | None = Field(default=None, gt=0)
    """Largest |trainer - engine| log-probability of any sampled token. Default: not limited."""
