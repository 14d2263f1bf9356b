"""Weight updates of a real engine: with full tensors, and by boxes from senders on the same node."""

from contextlib import contextmanager

import pytest
import torch

from megarl.engines.engine import EngineUpdate
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, TransferredBytes, open_store
from tests.engines import reference
from tests.engines.remote import (
    Senders,
    boxes_of,
    digest,
    let_work,
    piece_hashes,
    requests,
    send_bucket,
    sync,
    sync_boxes,
)
from tests.engines.sglang.serving import PROMPTS, assert_blocked, assert_serves
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, wait_until

NORM = "model.norm.weight"


@pytest.fixture
def served(engine, model_dir):
    """Weights that the engine serves as version 5."""
    weights = reference.changed(model_dir, seed=5)
    sync(engine, weights, 5)
    return weights


BAD_TENSORS = {
    "unknown name": ("model.layers.7.mlp.up_proj.weight", torch.zeros(128, 64), "is no tensor of the model"),
    "engine's own name": ("model.layers.0.mlp.gate_up_proj.weight", torch.zeros(256, 64), "is no tensor of the model"),
    "wrong shape": (NORM, torch.zeros(63), r"model.norm.weight needs shape \[64\], got \[63\]"),
    "wrong dtype": (NORM, torch.zeros(64).half(), "needs dtype float32, got float16"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_invalid_bucket_changes_nothing(engine, model_dir, served, tmp_path, case):
    name, tensor, message = BAD_TENSORS[case]
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match=message):
        send_bucket(engine, {"lm_head.weight": torch.zeros(256, 64), name: tensor})
    assert_serves(engine, model_dir, served, 5, tmp_path)


def test_missing_tensor_is_reported_and_blocks_the_engine_until_a_complete_update(engine, model_dir, served, tmp_path):
    weights = reference.changed(model_dir, seed=6)
    partial = {name: t for name, t in weights.items() if name != "model.layers.1.self_attn.k_norm.weight"}
    with expect_error(WeightSyncError, "1", "25", "1.self_attn.k_norm"):
        sync(engine, partial, 6)
    assert engine.call("health").policy_version == 5
    assert_blocked(engine, 5)
    sync(engine, weights, 6)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


@pytest.mark.usefixtures("served")
def test_an_update_needs_begin_weights_and_one_sender_for_each_rank(engine):
    with expect_error(WeightSyncError, "begin_weights"):
        send_bucket(engine, {NORM: torch.zeros(64)})
    for method, *arguments in (("end_weights", 6), ("receive_weights",)):
        with pytest.raises(WeightSyncError, match=f"{method} needs begin_weights first"):
            engine.call(method, *arguments)
    with expect_error(WeightSyncError, "1 TP", "2", "engine", "ranks"):
        engine.call("prepare_boxes", [None, None])


def test_abandoned_update_can_be_restarted(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    send_bucket(engine, {NORM: torch.zeros(64)})
    weights = reference.changed(model_dir, seed=7)
    sync(engine, weights, 7)
    assert_serves(engine, model_dir, weights, 7, tmp_path)


def test_empty_update_is_rejected_and_resumes_requests_in_flight(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    pending = engine.submit("generate_many", requests(PROMPTS))
    let_work(engine)
    assert not pending.done()
    with expect_error(WeightSyncError, "25", "tensors", "arrive"):
        engine.call("end_weights", 6)
    assert len(pending.result(HANG_SECONDS)) == len(PROMPTS)
    assert_serves(engine, model_dir, served, 5, tmp_path)


def test_requests_during_an_update_wait_for_it(engine, model_dir, served):
    weights = reference.changed(model_dir, seed=9)
    begin = engine.submit("begin_weights")
    along = engine.submit("generate_many", requests(PROMPTS))
    begin.result(HANG_SECONDS)
    early = engine.submit("generate_many", requests(PROMPTS))
    send_bucket(engine, weights)
    end = engine.submit("end_weights", 6)
    late = engine.submit("generate_many", requests(PROMPTS))
    end.result(HANG_SECONDS)
    for pending in (early, late):
        generations = pending.result(HANG_SECONDS)
        assert {v for g in generations for v in g.policy_versions} == {6}
        assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4
    assert len(along.result(HANG_SECONDS)) == len(PROMPTS)


@pytest.fixture(scope="module")
def layout(engine):
    (layout,) = engine.call("layouts")
    return layout


def test_an_open_update_has_changed_what_it_loaded(engine, layout, served):
    (hashes,) = piece_hashes(engine, [layout])
    assert hashes == {(p.tensor, p.box): digest(served[p.tensor][slices(p.box)]) for p in layout.pieces}
    engine.call("begin_weights")
    changed = served[NORM].clone()
    changed[5] += 1e-6
    send_bucket(engine, {NORM: changed})
    (now,) = piece_hashes(engine, [layout])
    assert {key for key in hashes if hashes[key] != now[key]} == {(NORM, ((0, 64),))}
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
            receiving = senders.receive()
            senders.send_all()
            assert receiving.result(HANG_SECONDS) == []
            engine.call("end_weights", version)
            assert_serves(engine, model_dir, versions[version], version, tmp_path)


def test_lost_sender_blocks_the_engine_until_the_next_update(engine, layout, model_dir, served, tmp_path):
    boxes = boxes_of(layout, reference.changed(model_dir, seed=6))
    engine.call("begin_weights")
    with Senders(engine, [[boxes[::2]], [boxes[1::2]]]) as senders:
        senders.prepare()
        receiving = senders.receive()
        senders.complete(0)
    with expect_error(WeightSyncError, "TP", "0", "trainer", "aborted"):
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

    def wait_received(self):
        assert wait_until(lambda: self.decision._add_nothing("received"))

    def commit(self, update):
        self.wait_received()
        self.decision.decide()
        update.result(HANG_SECONDS)


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
        with expect_error(WeightSyncError, "3", "aborted", "update"):
            update.result(HANG_SECONDS)
    assert_blocked(engine, 5)
    with updating(engine, layout, served, controller.update(7)) as (senders, update):
        senders.send_all()
        controller.commit(update)
    assert_serves(engine, model_dir, served, 7, tmp_path)


def test_update_ends_with_its_controller(engine, layout, model_dir, served):
    """The store is the controller's."""
    controller = Controller()
    with updating(engine, layout, served, controller.update(6), num_rounds=2) as (senders, update):
        senders.complete(0)
        del controller.store, controller.decision
        with expect_error(WeightSyncError, "127.0.0.1"):
            update.result(HANG_SECONDS)
    sync_boxes(engine, [layout], served, 5)


def test_full_tensors_in_one_call(engine, model_dir, served, tmp_path):
    weights, controller = reference.changed(model_dir, seed=6), Controller()
    engine.call("begin_weights")
    update = engine.submit("update_weights", controller.update(6, receives=False))
    send_bucket(engine, weights)
    controller.commit(update)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


@pytest.mark.parametrize("norm_rows", [60, None])
def test_boxes_that_leave_out_a_part_are_rejected_before_an_update(
    engine, layout, model_dir, served, tmp_path, norm_rows
):
    """Boxes of all but the last 4 elements of a norm, or no boxes at all."""
    boxes, message = None, ["not written"]
    if norm_rows is not None:
        boxes = [*boxes_of(layout, served, [NORM]), (NORM, ((0, norm_rows),), served[NORM][:norm_rows])]
        message = ["not written", NORM, "[60:64]"]
    with Senders(engine, [[boxes]]) as senders, expect_error(WeightSyncError, *message):
        senders.prepare()
    assert_serves(engine, model_dir, served, 5, tmp_path)
    weights = reference.changed(model_dir, seed=7)
    sync(engine, weights, 7)
    assert_serves(engine, model_dir, weights, 7, tmp_path)


def test_layouts_are_returned_while_the_engine_generates(engine, layout):
    pending = engine.submit("generate_many", requests(PROMPTS, max_new_tokens=100))
    assert engine.call("layouts") == [layout]
    assert len(piece_hashes(engine, [layout])[0]) == len(layout.pieces)
    assert len(pending.result(HANG_SECONDS)) == len(PROMPTS)
