"""The state of a scheduler whose generation is paused."""

from __future__ import annotations

import time

import psutil
import pytest

from megarl.errors import WeightSyncError
from tests.rollout.remote import requests
from tests.time_limits import HANG_SECONDS


def test_paused_scheduler_sleeps_and_wakes_up_for_commands(engine):
    (request,) = requests([[1, 2, 3]], temperature=0.0, max_new_tokens=4)
    (scheduler,) = map(psutil.Process, engine.call("health").scheduler_pids)
    engine.call("begin_weights")
    waiting = engine.submit("generate", request)
    states = []
    for _ in range(100):
        time.sleep(0.005)
        states.append(scheduler.status())
    assert states.count(psutil.STATUS_SLEEPING) > 50  # one that polls is never seen asleep, also on a busy machine
    assert not waiting.done()
    with pytest.raises(WeightSyncError, match="tensors did not arrive"):
        engine.call("end_weights", 1)  # ends the pause; the weights stay as they are
    assert 1 <= len(waiting.result(HANG_SECONDS).token_ids) <= 4
