"""Parser for the time limit of a Slurm job, in the notation of `sbatch --time`."""

from __future__ import annotations

import re

from megarl.errors import ConfigError

FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"

_WITH_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?")
_WITHOUT = re.compile(r"((?P<hours>\d+):(?=\d+:\d+))?(?P<minutes>\d+)(:(?P<seconds>\d+))?")


def parse_time_limit(text: str) -> int:
    """Parse a time limit and return it in seconds.

    Raises:
        ConfigError: `text` has none of the forms in the manual of sbatch, or is zero.
    """
    found = _WITH_DAYS.fullmatch(text) or _WITHOUT.fullmatch(text)
    if found is None:
        raise ConfigError(f"--time: needs {FORMS}, got {text!r}")
    parts = {name: int(value) for name, value in found.groupdict(default="0").items()}
    seconds = ((parts.get("days", 0) * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"]
    if not seconds:
        raise ConfigError(f"--time: needs a limit above zero, got {text!r}")
    return seconds
