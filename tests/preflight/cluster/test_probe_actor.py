"""The probe actor without Ray."""

from __future__ import annotations

import subprocess
import sys

from tests.time_limits import HANG_SECONDS

PROGRAM = """
import sys, time
from megarl.preflight.cluster.probe_actor import ProbeActor

actor = ProbeActor()
while "torch._C" not in sys.modules:
    time.sleep(0.0001)
print(actor.open_store("127.0.0.1", 300.0))
"""


def test_store_is_opened_while_torch_is_being_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
