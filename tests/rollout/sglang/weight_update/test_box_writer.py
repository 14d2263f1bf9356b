"""Weight updates by boxes, on a real engine."""

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.bucket import digest
from tests.rollout import reference
from tests.rollout.remote import boxes_of, requests, send_bucket, send_round, sync, sync_boxes
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS, assert_serves, served

__all__ = ["served"]

NORM = "model.norm.weight"
NORM_BOX = ((0, 64),)


@pytest.fixture(scope="module")
def layout(engine):
    (layout,) = engine.call("layouts")
    return layout


def test_successive_syncs_are_bitwise_exact(engine, layout, model_dir, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(model_dir, seed=version)
        engine.call("randomize_weights")
        sync_boxes(engine, [layout], weights, version, num_rounds=version)
        assert_serves(engine, model_dir, weights, version, tmp_path)


def test_parts_of_pieces_are_written(engine, layout, model_dir, tmp_path):
    """Cut at odd rows and columns, as plans do."""
    weights = reference.changed(model_dir, seed=4)
    engine.call("randomize_weights")
    boxes = []
    for local, box, elements in boxes_of(layout, weights):
        cut = tuple(start + (stop - start) // 3 for start, stop in box)
        for corner in range(2 ** len(box)):
            sides = [(corner >> d) & 1 for d in range(len(box))]
            part = tuple((c, b[1]) if s else (b[0], c) for b, c, s in zip(box, cut, sides, strict=True))
            here = tuple((p[0] - b[0], p[1] - b[0]) for p, b in zip(part, box, strict=True))
            boxes.append((local, part, elements[slices(here)]))
    engine.call("begin_weights")
    send_round(engine, 0, [boxes[1::2]])
    send_round(engine, 1, [boxes[::2]])
    engine.call("end_weights", 4)
    assert_serves(engine, model_dir, weights, 4, tmp_path)


def test_boxes_and_full_tensors_in_one_update(engine, layout, model_dir, tmp_path):
    weights = reference.changed(model_dir, seed=6)
    norms = {name: t for name, t in weights.items() if "norm" in name}
    engine.call("randomize_weights")
    engine.call("begin_weights")
    send_bucket(engine, norms)
    pieces = [p for p in layout.pieces if p.tensor not in norms]
    send_round(engine, 0, [[(p.local, p.local_box, weights[p.tensor][slices(p.box)]) for p in pieces]])
    engine.call("end_weights", 6)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


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


BAD_BOXES = {
    "unknown parameter": ((NORM + "s", NORM_BOX, torch.zeros(64)), "model.norm.weights is no parameter"),
    "out of bounds": ((NORM, ((1, 65),), torch.zeros(64)), r"\[1:65\] does not lie in .* has shape \[64\]"),
    "wrong dtype": ((NORM, NORM_BOX, torch.zeros(64).half()), "needs dtype float32, got float16"),
    "too many dimensions": ((NORM, ((0, 1), (0, 64)), torch.zeros(1, 64)), "has 2 dimensions, the parameter 1"),
    "overlap": ((NORM, ((7, 9),), torch.zeros(2)), r"\[7:9\] was written before, as part of \[0:8\]"),
}


@pytest.mark.parametrize("case", BAD_BOXES)
def test_invalid_round_changes_nothing(engine, layout, model_dir, served, tmp_path, case):
    box, message = BAD_BOXES[case]
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match=message):
        send_round(engine, 0, [[(NORM, ((0, 8),), torch.ones(8)), box]])
    assert_serves(engine, model_dir, served, 5, tmp_path)
    weights = reference.changed(model_dir, seed=6)
    sync_boxes(engine, [layout], weights, 6)
    assert_serves(engine, model_dir, weights, 6, tmp_path)


def test_invalid_round_after_a_valid_one_blocks_the_engine(engine, layout, model_dir, served, tmp_path):
    engine.call("begin_weights")
    send_round(engine, 0, [[(NORM, NORM_BOX, torch.ones(64))]])
    with pytest.raises(WeightSyncError, match="was written before"):
        send_round(engine, 1, [[(NORM, NORM_BOX, torch.ones(64))]])
    with pytest.raises(WeightSyncError, match="parts of version 5"):
        engine.generate(PROMPTS)
    sync_boxes(engine, [layout], served, 6)
    assert_serves(engine, model_dir, served, 6, tmp_path)


def test_unwritten_part_is_reported_and_blocks_the_engine_until_a_complete_update(
    engine, layout, model_dir, served, tmp_path
):
    weights = reference.changed(model_dir, seed=7)
    boxes = [box for box in boxes_of(layout, weights) if box[0] != NORM]
    engine.call("begin_weights")
    send_round(engine, 0, [[*boxes, (NORM, ((0, 60),), weights[NORM][:60])]])
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight was not written at \[60:64\]"):
        engine.call("end_weights", 7)
    assert engine.call("health").policy_version == 5
    with pytest.raises(WeightSyncError, match="parts of version 5"):
        engine.generate(PROMPTS)
    sync(engine, weights, 7)
    assert_serves(engine, model_dir, weights, 7, tmp_path)


def test_update_without_boxes_is_rejected_and_the_old_weights_are_served(engine, model_dir, served, tmp_path):
    engine.call("begin_weights")
    send_round(engine, 0, [None])
    with pytest.raises(WeightSyncError, match="was not written"):
        engine.call("end_weights", 6)
    assert_serves(engine, model_dir, served, 5, tmp_path)


@pytest.mark.usefixtures("served")
def test_load_boxes_needs_an_open_update_and_a_valid_rank(engine):
    with pytest.raises(WeightSyncError, match="load_boxes needs begin_weights first"):
        send_round(engine, 0, [None])
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match="TP ranks 0 to 0, got boxes for rank 1"):
        engine.call("load_boxes", 1, 0, None)


def test_layouts_are_returned_while_the_engine_generates(engine, layout):
    pending = engine.submit("generate_many", requests(PROMPTS, max_new_tokens=100))
    assert engine.call("layouts") == [layout]
    assert len(engine.call("piece_hashes")[0]) == len(layout.pieces)
    assert len(pending.result(30)) == len(PROMPTS)
