"""Time limits that tests share; generous, since the machine may be slow and busy."""

HANG_SECONDS = 600.0
"""Time after which a test takes a process, thread or call for hung.

Where a test shows that something does not wait for a time limit, that limit is longer than this.
"""

END_SECONDS = 40.0
"""Time in which all processes of a run end after the command that started it.

Shorter than the 60 s for which some of Ray's processes outlive a cluster that was killed.
"""
