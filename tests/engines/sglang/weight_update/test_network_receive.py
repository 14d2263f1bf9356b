"""A real engine with two TP ranks receives its boxes from two trainer ranks over separate connections."""

import dataclasses
import re
import signal
from functools import lru_cache

import psutil
import pytest
from safetensors.torch import load_file, save_file

from megarl.errors import WeightSyncError, WorkerError
from megarl.reshard.layout.layout import ShardPiece, WeightLayout, slices
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.strategy import DeltaUpdate
from megarl.reshard.transfer.commit_decision import open_store
from megarl.reshard.transfer.process_groups import TransferGroup
from tests.engines import reference
from tests.engines.remote import digest, piece_hashes, started
from tests.engines.sglang.serving import assert_blocked, assert_completes
from tests.errors import expect_error
from tests.reshard.rank_process import RankProcess, TransferMember
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

FAULT_SECONDS = 10.0
"""Time limit of a sync whose sender or receiver is stopped."""
NUM_VERSIONS = 12
STOP = (signal.SIGSTOP, 1)
"""Fault of a sync: trainer rank 1 stops itself."""


@dataclasses.dataclass(frozen=True)
class Versions:
    """The trainer's weights of each version, stored as files."""

    folder: str

    def __call__(self, tensor, version):
        return self.all_of(version)[tensor]

    @lru_cache(maxsize=2)  # noqa: B019 -- lives as long as the test
    def all_of(self, version):
        return load_file(f"{self.folder}/{version}.safetensors")


def trainer_layouts(tensors):
    """Layouts of two ranks: the first third of the rows of every matrix, and the rest; both hold the vectors."""
    pieces = [], []
    for name, spec in tensors.items():
        rows, cut = spec.shape[0], spec.shape[0] // 3
        for rank, here in enumerate([(0, rows)] * 2 if len(spec.shape) == 1 else [(0, cut), (cut, rows)]):
            others = [(0, n) for n in spec.shape[1:]]
            pieces[rank].append(ShardPiece(name, (here, *others), f"train.{name}", ((0, here[1] - here[0]), *others)))
    return [WeightLayout(tensors, tuple(of_rank)) for of_rank in pieces]


class World:
    """The engine, the trainer's ranks, and the store through which they connect."""

    def __init__(self, engine, model_dir, folder, nodes=(0, 0, 1, 1), bucket_bytes=1 << 16):
        self.engine, self.model_dir, self.versions = engine, model_dir, Versions(str(folder))
        for version in range(1, NUM_VERSIONS):
            save_file(reference.changed(model_dir, seed=version), folder / f"{version}.safetensors")
        needs = self.engine.call("weight_needs")
        self.layouts, sources = list(needs.layouts), trainer_layouts(needs.layouts[0].tensors)
        self.transfer_spec = TransferSpec(
            sources=sources, needs=needs.received(), num_engines=1, nodes=nodes, bucket_bytes=bucket_bytes
        )
        self.trainers = [RankProcess(TransferMember, rank, self.transfer_spec, self.versions) for rank in range(2)]
        self.store, self.num_connects = open_store("127.0.0.1"), 0
        self.version = 0
        """Version that the engine serves after the last sync."""
        for trainer in self.trainers:
            trainer.wait_started()

    def transfer_group(self, seconds=UNREACHED_SECONDS):
        self.num_connects += 1
        name, size = str(self.num_connects), self.transfer_spec.size
        return TransferGroup("127.0.0.1", self.store.port, name, size, timeout_seconds=seconds)

    def try_to_connect(self, transfer_spec=None, seconds=UNREACHED_SECONDS):
        """Return the errors of the engine and of the trainer's ranks."""
        transfer_group = self.transfer_group(seconds)
        connecting = self.engine.submit("join_trainer", transfer_spec or self.transfer_spec, 0, transfer_group)
        for trainer in self.trainers:
            trainer.begin("connect", transfer_group)
        error = connecting.exception(HANG_SECONDS)
        return [error, *(trainer.result().error for trainer in self.trainers)]

    def connect(self, transfer_spec=None):
        assert self.try_to_connect(transfer_spec) == [None] * 3

    def connect_with_limit(self):
        """Connect for syncs that end after `FAULT_SECONDS`; again, if connecting takes longer on a busy machine."""
        assert [None] * 3 in (self.try_to_connect(seconds=FAULT_SECONDS) for _ in range(10))

    def begin(self, version, fault=None, delta=None):
        """Begin a sync; return the future of the engine's `receive_weights`."""
        self.engine.call("begin_weights")
        for trainer in self.trainers:
            trainer.begin("sync", version, fault, delta)
        return self.engine.submit("receive_weights", delta)

    def begin_and_stop_trainer(self, version):
        """Begin a sync, during which trainer rank 1 is stopped; return once it is."""
        receiving, stopping = self.begin(version, STOP), psutil.Process(self.trainers[1].process.pid)
        assert wait_until(lambda: stopping.status() == psutil.STATUS_STOPPED)
        return receiving

    def sync(self, version, delta=None):
        """Run a sync; return the statistics of all four ranks."""
        receiving = self.begin(version, delta=delta)
        sent = [trainer.result() for trainer in self.trainers]
        received = receiving.result(HANG_SECONDS)
        assert [outcome.error for outcome in sent] == [None, None]
        self.engine.call("end_weights", version)
        self.version = version
        return [*(outcome.value[0] for outcome in sent), *received]

    def ready(self):
        """Connect all ranks and serve version 1, whatever tests before have left; return this world."""
        for trainer in self.trainers:
            trainer.settle()
        self.connect()
        self.sync(1)
        return self

    def close(self):
        for trainer in self.trainers:
            trainer.close()


@pytest.fixture(scope="module")
def shared_world(spec, uneven_dir, tmp_path_factory):
    with started(spec, model_path=uneven_dir, tp=2) as engine:
        world = World(engine, uneven_dir, tmp_path_factory.mktemp("versions"))
        yield world
        world.close()


@pytest.fixture
def world(shared_world):
    return shared_world.ready()


def assert_serves(world):
    weights = world.versions.all_of(world.version)
    for layout, hashes in zip(world.layouts, piece_hashes(world.engine, world.layouts), strict=True):
        assert hashes == {(p.tensor, p.box): digest(weights[p.tensor][slices(p.box)]) for p in layout.pieces}
    assert_completes(world.engine, world.model_dir, weights, world.version)


def test_three_syncs_are_bitwise_exact_and_counted(world):
    for version in (1, 2, 3):
        world.engine.call("randomize_weights")
        stats = world.sync(version)
        assert_serves(world)
        for rank, counted in enumerate(stats):
            rounds = world.transfer_spec.plan(rank).rounds
            hops = [hop for r in rounds for hop in r.hops]
            assert counted.bytes_sent == sum(hop.bytes_sent for hop in hops)
            assert counted.bytes_received == sum(m.num_bytes for hop in hops for m in hop.receives)
            assert counted.messages == sum(len(hop.receives) for hop in hops)
            assert len(rounds) > 3
        need = sum(t.numel() * t.element_size() for t in world.versions.all_of(version).values())
        # both ranks hold norms and the key-value head, which are sent to their node once
        assert sum(b.bytes_sent for b in stats[:2]) == need
        assert sum(b.bytes_received for b in stats) == sum(b.bytes_sent for b in stats) > need


def test_delta_sync_sends_changed_boxes_only(world):
    """Of the versions 3, 3 and 4 after each other, the second sends nothing; 4 has other values everywhere."""
    whole = world.sync(3, DeltaUpdate(number=1))
    same = world.sync(3, DeltaUpdate(number=2, base=1))
    assert_serves(world)
    assert sum(stats.bytes_received - stats.count_bytes for stats in same) == 0
    assert sum(stats.bytes_not_received for stats in same) == sum(stats.bytes_received for stats in whole)
    changed = world.sync(4, DeltaUpdate(number=3, base=2))
    assert_serves(world)
    assert [stats.bytes_received - stats.count_bytes for stats in changed] == [stats.bytes_received for stats in whole]
    world.engine.call("begin_weights")
    with expect_error(WeightSyncError, "2", "weights", "engine"):
        world.engine.call("receive_weights", DeltaUpdate(number=4, base=2))
    world.sync(3)
    assert_serves(world)


def test_stalled_sender_blocks_the_engine_until_the_next_sync(world):
    world.connect_with_limit()
    receiving = world.begin(4, STOP)
    with expect_error(WeightSyncError, "TP", "0", "1") as failure:
        receiving.result(HANG_SECONDS)
    for rank in (2, 3):
        assert re.search(rf"rank {rank}: round \d+ of the weights: ", str(failure.value))
    assert re.search(rf"nothing from ranks? [\d, ]*1\b[\d, ]* within {FAULT_SECONDS:g} s", str(failure.value))
    other = world.trainers[0].result()
    assert other.error.startswith("rank 0: round ")
    assert other.buffers == 0
    assert_blocked(world.engine, world.version)
    world.trainers[1].signal(signal.SIGCONT)
    assert world.trainers[1].result().error.startswith("rank 1: round ")
    assert_blocked(world.engine, world.version)
    world.connect()
    world.sync(5)
    assert_serves(world)


def test_stalled_receiver_is_reported_and_the_next_sync_repairs_it(world):
    stalled = world.engine.scheduler_processes()[1]
    world.connect_with_limit()
    receiving = world.begin_and_stop_trainer(6)
    stalled.send_signal(signal.SIGSTOP)
    world.trainers[1].signal(signal.SIGCONT)
    assert all(re.match(r"rank \d: round \d+ of the weights: ", t.result().error) for t in world.trainers)
    world.engine.call("pass_time_limit", "the command to receive weights")
    with expect_error(WeightSyncError, "TP", "1", "2400", "answer", "within"):
        receiving.result(HANG_SECONDS)
    assert_blocked(world.engine, world.version)
    stalled.send_signal(signal.SIGCONT)
    world.engine.call("begin_weights")
    world.connect()
    world.sync(7)
    assert_serves(world)


def test_plan_that_does_not_fit_is_rejected_before_connecting(world):
    """The plan contains a parameter that the second rank lacks."""
    broken = [dataclasses.replace(p, local="nonsense") if "norm" in p.local else p for p in world.layouts[1].pieces]
    needs = [world.layouts[0], WeightLayout(world.layouts[1].tensors, tuple(broken))]
    spec = dataclasses.replace(world.transfer_spec, needs=needs)
    with expect_error(WeightSyncError, "TP", "1", "parameter", "nonsense"):
        world.engine.call("join_trainer", spec, 0, world.transfer_group())
    assert_serves(world)
    world.connect()
    world.sync(9)
    assert_serves(world)


def test_gap_in_the_plan_is_found_before_connecting(world):
    layout = world.layouts[1]
    short = WeightLayout(layout.tensors, tuple(p for p in layout.pieces if "down_proj" not in p.local))
    spec = dataclasses.replace(world.transfer_spec, needs=[world.layouts[0], short])
    with expect_error(WeightSyncError, "TP", "1", "down_proj.weight"):
        world.engine.call("join_trainer", spec, 0, world.transfer_group())
    assert_serves(world)
    world.connect()
    world.sync(11)
    assert_serves(world)


def test_receive_without_connections_is_rejected(world):
    with expect_error(WeightSyncError, "2", "4", "0", "1", "connect", "nothing"):
        world.engine.call("join_trainer", world.transfer_spec, 0, world.transfer_group(seconds=3.0))
    world.engine.call("begin_weights")
    with expect_error(WeightSyncError, "2", "connections", "other"):
        world.engine.call("receive_weights")


@pytest.mark.last
def test_dead_engine_fails_the_sync_without_waiting(world):
    scheduler = world.engine.scheduler_processes()[0]
    receiving = world.begin_and_stop_trainer(1)
    scheduler.kill()
    with pytest.raises(WorkerError, match="SIGKILL"):
        receiving.result(HANG_SECONDS)
    world.trainers[1].signal(signal.SIGCONT)
    assert all(re.match(r"rank \d: round \d+ of the weights: ", t.result().error) for t in world.trainers)
