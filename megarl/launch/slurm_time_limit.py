"""How long a Slurm job may take, as sbatch's --time has it."""

from __future__ import annotations

import re

from megarl.errors import ConfigError

FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"

_WITH_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?")
_WITHOUT = re.compile(r"((?P<hours>\d+):(?=\d+:\d+))?(?P<minutes>\d+)(:(?P<seconds>\d+))?")


def parse_time_limit(text: str) -> int:
    """Seconds.

    Raises:
        ConfigError: it is in none of the forms that sbatch's manual lists.
    """
    found = _WITH_DAYS.fullmatch(text) or _WITHOUT.fullmatch(text)
    if found is None:
        raise ConfigError(f"--time: needs {FORMS}, got {text!r}")
    parts = {name: int(value) for name, value in found.groupdict(default="0").items()}
    seconds = ((parts.get("days", 0) * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"]
    if not seconds:
        raise ConfigError(f"--time: needs more than no time at all, got {text!r}")
    return seconds
