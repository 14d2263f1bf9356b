"""A push that fails breaks the trainer ranks' connections: the next one makes them anew."""

from types import SimpleNamespace

import pytest

from megarl.controller import weights
from megarl.errors import WeightSyncError
from megarl.reshard.strategy import SyncStats

STATS = SyncStats(bytes_sent=1, bytes_received=1, bytes_delivered=2, buckets=1, peak_extra_bytes=3)


class Trainer:
    grid = None

    def __init__(self):
        self.calls, self.fails = [], False

    def prepare_sync(self, setup):
        self.calls.append(f"prepare {setup}")

    def push_weights(self):
        self.calls.append("push")
        if self.fails:
            raise WeightSyncError("rank 0: round 3 of the weights: nothing from rank 1 within 5 s")
        return STATS


class Engines:
    def __init__(self):
        self.calls = []

    def call(self, *call):
        self.calls.append(call)


def test_connections_are_made_anew_after_a_push_that_failed_and_only_then(monkeypatch):
    monkeypatch.setattr(weights, "sync_setup", lambda *_: "setup")
    trainer, engines = Trainer(), Engines()
    sync = weights.WeightSync(SimpleNamespace(), trainer, engines, SimpleNamespace())
    for version in (0, 1):
        assert sync.push(version).bytes_moved == 3
    trainer.fails = True
    with pytest.raises(WeightSyncError, match="nothing from rank 1"):
        sync.push(2)
    assert sync.policy_version == 1
    assert engines.calls[-1] == ("begin_weights",)
    trainer.fails = False
    sync.push(2)
    assert sync.policy_version == 2
    assert trainer.calls == ["prepare setup", "push", "push", "push", "prepare setup", "push"]
