"""Weight updates by boxes from senders on the same node, on a real engine."""

from contextlib import contextmanager

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.bucket import digest
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, TransferredBytes
from megarl.reshard.transfer.sync_store import open_store
from megarl.rollout.engine import EngineUpdate
from tests.rollout import reference
from tests.rollout.remote import Senders, boxes_of, let_work, requests, send_bucket, send_rounds, sync, sync_boxes
from tests.rollout.sglang.serving import PROMPTS, assert_blocked, assert_serves
from tests.rollout.sglang.weight_update.test_update_session import served
from tests.time_limits import HANG_SECONDS, wait_until

__all__ = ["served"]

NORM = "model.norm.weight"
NORM_BOX = ((0, 64),)


@pytest.fixture(scope="module")
def layout(engine):
    (layout,) = engine.call("layouts")
    return layout


def test_piece_hashes_match_the_weights(engine, layout, served):
    (hashes,) = engine.call("piece_hashes")
    assert hashes == {(p.tensor, p.box): digest(served[p.tensor][slices(p.box)]) for p in layout.pieces}
    engine.call("begin_weights")
    changed = served["model.norm.weight"].clone()
    changed[5] += 1e-6
    send_bucket(engine, {"model.norm.weight": changed})
    (now,) = engine.call("piece_hashes")
    assert {key for key in hashes if hashes[key] != now[key]} == {(NORM, NORM_BOX)}
    sync(engine, served, 5)


def test_boxes_that_do_not_fit_are_rejected_before_an_update(engine, layout, model_dir, served, tmp_path):
    boxes = [(NORM, ((0, 8),), torch.ones(8)), (NORM, ((7, 9),), torch.ones(2))]
    message = r"^TP rank 0: .*\[7:9\] is also written as part of \[0:8\]"
    with Senders(engine, [[boxes]]) as senders, pytest.raises(WeightSyncError, match=message):
        senders.prepare()
    assert_serves(engine, model_dir, served, 5, tmp_path)
    weights = reference.changed(model_dir, seed=6)
    sync_boxes(engine, [layout], weights, 6)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


def test_one_preparation_serves_many_updates(engine, layout, model_dir, tmp_path):
    versions = {version: reference.changed(model_dir, seed=version) for version in (1, 2, 3)}
    boxes = {version: boxes_of(layout, weights) for version, weights in versions.items()}
    with Senders(engine, [[boxes[1][::2]], [boxes[1][1::2]]]) as senders:
        senders.prepare()
        for version in versions:
            engine.call("randomize_weights")
            for part in range(2):
                for slot, (_, _, elements) in zip(senders.buckets[part][0].slots, boxes[version][part::2], strict=True):
                    flat = senders.buffers[part].bytes[slot.offset : slot.offset + slot.num_bytes]
                    flat.copy_(elements.contiguous().view(torch.uint8).flatten())
            engine.call("begin_weights")
            receiving = engine.submit("receive_weights")
            senders.begin()
            senders.send_all()
            assert receiving.result(HANG_SECONDS) == []
            engine.call("end_weights", version)
            assert_serves(engine, model_dir, versions[version], version, tmp_path)


def test_lost_sender_blocks_the_engine_until_the_next_update(engine, layout, model_dir, served, tmp_path):
    weights = reference.changed(model_dir, seed=6)
    boxes = boxes_of(layout, weights)
    engine.call("begin_weights")
    with Senders(engine, [[boxes[::2]], [boxes[1::2]]]) as senders:
        senders.prepare()
        receiving = engine.submit("receive_weights")
        senders.begin()
        for wait in senders.send(0):
            wait()
    with pytest.raises(WeightSyncError, match=r"TP rank 0: .*trainer rank 0 has aborted the sync, or has ended"):
        receiving.result(HANG_SECONDS)
    assert_blocked(engine, 5)
    sync_boxes(engine, [layout], served, 6)
    assert_serves(engine, model_dir, served, 6, tmp_path)


class Controller:
    """The decisions about updates of one engine and, if `others`, of one more engine that is not there."""

    def __init__(self, others=0):
        self.store, self.count, self.size = open_store("127.0.0.1"), 0, 1 + others

    def update(self, version, **options):
        self.count += 1
        spec = CommitSpec("127.0.0.1", self.store.port, f"update {self.count}", self.size)
        self.decision = CommitDecision(spec, self.store)
        return EngineUpdate(policy_version=version, commit=spec, **options)

    def wait_received(self, count=1):
        assert wait_until(lambda: self.decision._add_nothing("received") >= count)


@contextmanager
def updating(engine, layout, weights, update, num_rounds=1):
    """Begin an update in one call; return the senders of its boxes and its future."""
    boxes = boxes_of(layout, weights)
    with Senders(engine, [[boxes[i::num_rounds]] for i in range(num_rounds)]) as senders:
        senders.prepare()
        future = engine.submit("update_weights", update)
        senders.begin()
        yield senders, future


def test_update_in_one_call_commits_only_once_all_engines_have_received(engine, layout, model_dir, served, tmp_path):
    weights, controller = reference.changed(model_dir, seed=6), Controller(others=1)
    with updating(engine, layout, weights, controller.update(6)) as (senders, update):
        senders.send_all()
        controller.wait_received()
        let_work(engine)
        assert not controller.decision.has_everyone_received()
        assert not update.done()
        assert engine.call("health").policy_version == 5
        controller.decision.report_received(TransferredBytes())
        assert controller.decision.has_everyone_received()
        controller.decision.decide()
        report = update.result(HANG_SECONDS)
        assert (report.stats, report.open_seconds > 0, report.commit_seconds > 0) == ((), True, True)
        assert_serves(engine, model_dir, weights, 6, tmp_path)


@pytest.mark.parametrize("when", ["before the boxes", "after them"])
def test_update_that_the_controller_aborts(engine, layout, model_dir, served, tmp_path, when):
    weights, controller = reference.changed(model_dir, seed=6), Controller()
    with updating(engine, layout, weights, controller.update(6)) as (senders, update):
        if when == "after them":
            senders.send_all()
            controller.wait_received()
        controller.decision.decide("engine 3 is lost")
        with pytest.raises(WeightSyncError, match="the update was aborted: engine 3 is lost"):
            update.result(HANG_SECONDS)
    assert_blocked(engine, 5)
    with updating(engine, layout, served, controller.update(7)) as (senders, update):
        senders.send_all()
        controller.wait_received()
        controller.decision.decide()
        update.result(HANG_SECONDS)
    assert_serves(engine, model_dir, served, 7, tmp_path)


def test_update_ends_with_its_controller(engine, layout, model_dir, served):
    """The store is the controller's."""
    controller = Controller()
    with updating(engine, layout, served, controller.update(6), num_rounds=2) as (senders, update):
        for wait in senders.send(0):
            wait()
        del controller.store, controller.decision
        with pytest.raises(WeightSyncError, match=r"the store of the sync at 127\.0\.0\.1:.* has ended"):
            update.result(HANG_SECONDS)
    sync_boxes(engine, [layout], served, 5)


def test_full_tensors_in_one_call(engine, model_dir, served, tmp_path):
    weights, controller = reference.changed(model_dir, seed=6), Controller()
    engine.call("begin_weights")
    update = engine.submit("update_weights", controller.update(6, begins=False, receives=False))
    send_bucket(engine, weights)
    controller.wait_received()
    controller.decision.decide()
    update.result(HANG_SECONDS)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


def test_unwritten_part_is_reported_and_blocks_the_engine_until_a_complete_update(
    engine, layout, model_dir, served, tmp_path
):
    weights = reference.changed(model_dir, seed=7)
    boxes = [box for box in boxes_of(layout, weights) if box[0] != NORM]
    engine.call("begin_weights")
    send_rounds(engine, [[[*boxes, (NORM, ((0, 60),), weights[NORM][:60])]]])
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight was not written at \[60:64\]"):
        engine.call("end_weights", 7)
    assert engine.call("health").policy_version == 5
    assert_blocked(engine, 5)
    sync(engine, weights, 7)
    assert_serves(engine, model_dir, weights, 7, tmp_path)


def test_update_without_boxes_is_rejected_and_the_old_weights_are_served(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    send_rounds(engine, [[None]])
    with pytest.raises(WeightSyncError, match="was not written"):
        engine.call("end_weights", 6)
    assert_serves(engine, model_dir, served, 5, tmp_path)


@pytest.mark.usefixtures("served")
def test_receive_needs_an_open_update_and_one_sender_for_each_rank(engine):
    with pytest.raises(WeightSyncError, match="receive_weights needs begin_weights first"):
        engine.call("receive_weights")
    with pytest.raises(WeightSyncError, match="the engine has 1 TP ranks, got boxes for 2"):
        engine.call("prepare_boxes", [None, None])


def test_layouts_are_returned_while_the_engine_generates(engine, layout):
    pending = engine.submit("generate_many", requests(PROMPTS, max_new_tokens=100))
    assert engine.call("layouts") == [layout]
    assert len(engine.call("piece_hashes")[0]) == len(layout.pieces)
    assert len(pending.result(HANG_SECONDS)) == len(PROMPTS)
