"""A failed push breaks the connections of the ranks: the next push reconnects both sides."""

from types import SimpleNamespace

import pytest

from megarl.errors import WeightSyncError
from megarl.groups import weight_sync
from megarl.megatron.requests import RendezvousInfo
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.process_groups import TransferGroup

STATS = SyncStats(bytes_sent=1, bytes_received=1, bytes_delivered=2, buckets=1, peak_extra_bytes=3)
NOTHING = WeightLayout({}, ())
HANDOVER = TransferSpec(sources=[NOTHING] * 2, needs=[NOTHING], num_engines=1, nodes=(0, 0, 1), bucket_bytes=1)
CONFIG = SimpleNamespace(weight_sync=SimpleNamespace(timeout_seconds=9.0))


class FakeTrainer:
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


class FakeSupervisor:
    """Fake supervisor: all engines are ready, and no failure is attributed to them."""

    def wait_ready(self):
        return [0]

    def mark_serving(self, replicas):
        assert replicas == [0]

    def attribute_failure(self, error):
        return False


class FakeEngines:
    def __init__(self):
        self.calls, self.engines, self.supervisor = [], ["engine 0"], FakeSupervisor()

    def select(self, replicas):
        assert replicas == [0]
        return self

    def call(self, *call):
        self.calls.append(call)


def test_ranks_reconnect_only_after_a_failed_push(monkeypatch):
    monkeypatch.setattr(weight_sync, "make_sync_setup", lambda *_: "setup")
    trainer, engines = FakeTrainer(), FakeEngines()
    sync = weight_sync.WeightSync(CONFIG, trainer, engines, SimpleNamespace(device="cpu"))
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


def make_stats(sent, received, extra):
    return SyncStats(
        bytes_sent=sent,
        bytes_received=received,
        bytes_delivered=received,
        buckets=2 if received else 0,
        peak_extra_bytes=extra,
    )


class FakeCall:
    """A pending call on one side."""

    def __init__(self, value):
        self.value = value

    def joined_with(self, other):
        return FakeCall((self.value, other.value))

    def result(self, _):
        if isinstance(self.value[1], Exception):
            raise self.value[1]
        return self.value


class FakeDisaggregatedTrainer(FakeTrainer):
    def prepare_sync(self, setup):
        super().prepare_sync(setup)
        return RendezvousInfo(transfer_spec=HANDOVER, host="10.0.0.1", port=7000 + len(self.calls))

    def begin_connect(self, transfer_group):
        self.calls.append(transfer_group)
        return FakeCall(None)

    def begin_push(self):
        self.calls.append("push")
        lost = WeightSyncError("rank 0: round 3 of the weights: nothing from rank 2 within 9 s")
        return FakeCall(lost if self.fails else make_stats(5, 0, 7))


class FakeDisaggregatedEngines(FakeEngines):
    def prepare_receive(self, transfer_spec):
        self.calls.append(transfer_spec)

    def begin(self, *call):
        self.calls.append(call)
        return FakeCall([[make_stats(1, 4, 3), make_stats(0, 2, 3)]])


def test_disaggregated_engines_receive_while_the_trainer_sends(monkeypatch):
    monkeypatch.setattr(weight_sync, "make_sync_setup", lambda *_: "setup")
    trainer, engines = FakeDisaggregatedTrainer(), FakeDisaggregatedEngines()
    sync = weight_sync.WeightSync(CONFIG, trainer, engines, SimpleNamespace(device="cpu"))
    first = TransferGroup("10.0.0.1", 7001, "weights", 3, 9.0)
    report = sync.push(0)
    assert report.stats == make_stats(6, 6, 7)
    assert report.bytes_moved == 6
    trainer.fails = True
    message = r"nothing from rank 2 within 9 s \(ranks up to 1 .*, those of engine i begin at 2 \+ 1 \* i\)"
    with pytest.raises(WeightSyncError, match=message):
        sync.push(1)
    assert sync.policy_version == 0
    trainer.fails = False
    sync.push(1)
    second = TransferGroup("10.0.0.1", 7005, "weights", 3, 9.0)
    assert trainer.calls == ["prepare setup", first, "push", "push", "prepare setup", second, "push"]
    receive, begin = ("receive_weights",), ("begin_weights",)
    assert engines.calls == [
        *(HANDOVER, ("join_trainer", first)),
        *(begin, receive, ("end_weights", 0)),
        *(begin, receive),
        *(begin, HANDOVER, ("join_trainer", second), receive, ("end_weights", 1)),
    ]


def test_resync_is_retried_if_another_engine_was_lost(monkeypatch):
    monkeypatch.setattr(weight_sync, "make_sync_setup", lambda *_: "setup")
    trainer, engines = FakeTrainer(), FakeEngines()
    trainer.offload_config = SimpleNamespace(is_enabled=False)
    sync = weight_sync.WeightSync(CONFIG, trainer, engines, SimpleNamespace(device="cpu"))
    sync.push(4)
    engines.calls.clear()
    engines.supervisor.ready = [0, 1]

    def attribute_failure(error):
        engines.supervisor.ready, trainer.fails = [0], False
        return True

    trainer.fails, engines.supervisor.attribute_failure = True, attribute_failure
    sync.resync(0)
    assert engines.calls == [("begin_weights",), ("begin_weights",), ("end_weights", 4)]
    sync.resync(1)  # the engine that was lost
    assert len(engines.calls) == 3
