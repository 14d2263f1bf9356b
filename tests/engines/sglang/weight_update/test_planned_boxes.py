"""The boxes of a plan against a small model, without SGLang, and the modules in FP8 that can be written as boxes."""

import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megarl.engines.sglang.weight_layout.engine_trace import fold
from megarl.engines.sglang.weight_update import messages, weight_loader
from megarl.engines.sglang.weight_update.planned_boxes import PlannedBoxes
from megarl.engines.sglang.weight_update.weight_loader import keeps_fp8_blocks
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.box_channel import BoxSender
from megarl.reshard.transfer.bucket import BoxSlot
from megarl.reshard.transfer.element_code import encode
from tests.engines.remote import box_bucket
from tests.errors import expect_error
from tests.time_limits import UNREACHED_SECONDS


class Engine(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
        self.register_buffer("c", torch.zeros(2, 3, 5))
        self.tied = self.a


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(weight_loader, "tp_rank", lambda: 0)
    monkeypatch.setattr(weight_loader, "tp_group", lambda: None)
    # without SGLang's model
    monkeypatch.setattr(weight_loader, "make_planned_boxes", lambda *inputs: PlannedBoxes(*inputs[:2]))
    return Engine()


BOXES = [
    [("b", ((1, 3), (1, 3)), torch.arange(4).reshape(2, 2).bfloat16()), ("a", ((0, 3),), torch.arange(3.0))],
    [],
    [("a", ((3, 4),), torch.tensor([9.0])), ("c", ((1, 5), (2, 5)), torch.randn(4, 3))],
]


def slots_of(boxes):
    return box_bucket(boxes)[1].slots


def test_rounds_are_copied_bitwise_into_their_boxes(model):
    planned = PlannedBoxes(model, [slots_of(boxes) for boxes in BOXES])
    for index, boxes in enumerate(BOXES):
        buffer, _ = box_bucket(boxes)
        with torch.no_grad():
            planned.write_round(index, buffer.bytes)
        buffer.close()
    for boxes in BOXES:
        for local, box, elements in boxes:
            assert torch.equal(fold(getattr(model, local), len(box))[slices(box)], elements)
    assert model.b.count_nonzero() == 3  # and nothing else


def test_boxes_of_stacked_tensors_are_copied_into_transposed_parameters(model):
    """gpt-oss: columns of gate and up, and their biases, are pairs."""
    model.w = torch.nn.Parameter(torch.zeros(2, 6, 5))
    model.w_bias = torch.nn.Parameter(torch.zeros(2, 6))
    weights, biases = torch.randn(2, 5, 3, 2), torch.randn(2, 3, 2)
    boxes = [("w.mT", ((0, 2), (0, 5), (0, 3), (0, 2)), weights), ("w_bias", ((0, 2), (0, 3), (0, 2)), biases)]
    buffer, _ = box_bucket(boxes)
    with torch.no_grad():
        PlannedBoxes(model, [slots_of(boxes)]).write_round(0, buffer.bytes)
    buffer.close()
    assert torch.equal(model.w, weights.flatten(2).mT)
    assert torch.equal(model.w_bias, biases.flatten(1))


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (BoxSlot("nonsense", ((0, 1),), "float32", 0), "nonsense is no parameter of the engine"),
        (BoxSlot("a", ((1, 5),), "float32", 0), r"a \[1:5\] does not lie in the parameter, which has shape \[4\]"),
        (BoxSlot("a", ((2, 2),), "float32", 0), "does not lie in the parameter"),
        (BoxSlot("a", ((0, 4),), "float16", 0), "a .* needs dtype float32, got float16"),
        (BoxSlot("a", ((0, 1), (0, 4)), "float32", 0), "has 2 dimensions, the parameter 1"),
        (BoxSlot("a", ((0, 2),), "float32", 2), r"lies at byte 2 of the bucket, .* multiple of 4"),
        (BoxSlot("a", ((2, 4),), "float32", 0), r"a \[2:4\] is also written as part of \[0:3\]"),
        (BoxSlot("tied", ((2, 4),), "float32", 0), "tied is no parameter of the engine"),
        (BoxSlot("b", ((0, 12),), "bfloat16", 0), "b is received both with 2 and with 1 dimensions"),
    ],
)
def test_boxes_that_do_not_fit_are_rejected(model, slot, message):
    with pytest.raises(WeightSyncError, match=message):
        PlannedBoxes(model, [slots_of(BOXES[0]), [slot]])


def test_bucket_that_ends_too_early_is_rejected(model):
    planned = PlannedBoxes(model, [slots_of(BOXES[0])])
    with expect_error(WeightSyncError, "0", "76", "64", "bucket", "round"):
        planned.write_round(0, torch.zeros(64, dtype=torch.uint8))


def test_reallocated_parameters_are_found_again(model):
    planned = PlannedBoxes(model, [slots_of(BOXES[0])])
    buffer, _ = box_bucket(BOXES[0])
    with torch.no_grad():
        planned.write_round(0, buffer.bytes)
        old, model.a.data = model.a.data, torch.zeros(4)
        planned.refresh(model)
        planned.write_round(0, buffer.bytes)
    assert model.a.tolist() == old.tolist() == [0.0, 1.0, 2.0, 0.0]
    buffer.close()
    model.a.data = torch.zeros(5)
    with expect_error(WeightSyncError, "float32 [4]", "float32 [5]"):
        planned.refresh(model)
    del model.a, model.tied
    with expect_error(WeightSyncError, "parameter", "longer"):
        planned.refresh(model)


def execute(model, command, folder):
    weight_loader.load(model, [(command | {"reply": str(folder / "reply")}, torch.empty(0))])
    return messages.read_reply(messages.reply_path(str(folder / "reply"), 0))


FAULTS = {
    "missing bucket": "No such file",
    "short bucket": "needs 10000000 bytes, got 4096",
    "aborted": "rank 7 is lost",
    "withdrawn": "trainer rank 0 has aborted the sync, or has ended",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_receive_is_reported_to_both_sides(model, tmp_path, fault):
    (buffer, bucket), abort_file = box_bucket(BOXES[0]), tmp_path / "abort"
    sender = BoxSender("trainer rank 0", "engine 0 rank 0", [bucket.slots], UNREACHED_SECONDS)
    waits = {"abort_file": abort_file, "seconds": UNREACHED_SECONDS}
    receive = {"op": "receive", "delta": None} | waits
    prepare = {"op": "prepare", "offers": [asdict(sender.offer)], "model_path": "unused", "dtype": "float32"}
    assert execute(model, prepare, tmp_path).error is None
    sender.begin()
    if fault == "aborted":
        abort_file.write_text("the update was aborted: rank 7 is lost")
    elif fault == "withdrawn":
        sender.close()
    else:
        if fault == "missing bucket":
            buffer.close()
        else:
            bucket = replace(bucket, num_bytes=10**7)
        wait = sender.load_boxes(0, bucket)
    reply = execute(model, receive, tmp_path)
    assert FAULTS[fault] in reply.error
    assert reply.wrote  # it may have
    if fault.endswith("bucket"):
        wait()
        assert FAULTS[fault] in sender.failure
    again = execute(model, receive, tmp_path)
    assert "the connection with trainer rank 0 was closed when a sync failed" in again.error
    assert not again.wrote
    assert torch.equal(model.a, torch.zeros(4))
    sender.close()
    buffer.close()


ROWS = BoxSlot("weight", ((2, 6), (0, 3)), "float32", 0), BoxSlot("bias", ((0, 4),), "float32", 48)


def planned_linear():
    linear = nn.Linear(3, 6)
    linear.load_state_dict({"weight": torch.zeros(6, 3), "bias": torch.zeros(6)})
    return linear, PlannedBoxes(linear, [[], ROWS])


def test_codes_of_planned_boxes_are_written():
    linear, planned = planned_linear()
    weight, bias = torch.zeros(4, 3), torch.zeros(4)
    weight[1, 2], weight[3, 0], bias[2] = 1.0, 2.0, 3.0
    codes = [encode(box, torch.zeros(box.numel(), dtype=torch.int32))[1] for box in (weight, bias)]
    bucket = torch.cat([torch.zeros(5, dtype=torch.uint8), *codes])  # at no multiple of an element's size
    codes = planned.check_codes(np.array([[1, 0, 2, 5], [1, 1, 1, 5 + len(codes[0])]]))
    assert list(codes) == [1]
    with torch.no_grad():
        planned.write_round(1, bucket, codes[1])
    assert torch.equal(linear.weight[2:], weight)
    assert not linear.weight[:2].any()
    assert linear.bias.tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert planned.check_codes(np.zeros((0, 4), np.int64)) == {}
    with expect_error(WeightSyncError, "1", str(len(bucket)), str(len(bucket) - 1), "bucket", "box"):
        planned.write_round(1, bucket[:-1], codes[1])


@pytest.mark.parametrize("line", [[0, 0, 1, 0], [2, 0, 1, 0], [1, 2, 1, 0], [1, 0, 13, 0], [1, 1, 0, 0], [1, 0, 1, -1]])
def test_codes_have_to_be_of_planned_boxes(line):
    _, planned = planned_linear()
    number, *rest = line
    with pytest.raises(WeightSyncError, match=re.escape(f"round {number} has no box for {rest} (slot, changed")):
        planned.check_codes(np.array([[1, 0, 4, 0], line]))


def linear(**changes):
    module = nn.Module()
    scales = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    scales.format_ue8m0 = False
    module.register_parameter("weight_scale_inv", scales)
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def method(**changes):
    """Return an object with the attributes of SGLang's quantization methods."""
    return SimpleNamespace(**{"block_quant": True, "weight_block_size": [128, 128], "use_mxfp8": False} | changes)


def experts(backend):
    return method(is_fp4_expert=False, get_moe_runner_backend=lambda _: backend and SimpleNamespace(value=backend))


def test_plain_blocks_are_kept():
    assert keeps_fp8_blocks(linear(), method())
    assert keeps_fp8_blocks(linear(_block_fp8_bf16_weight=None), method(use_marlin=False, block_fp8_as_mxfp8=False))
    assert all(keeps_fp8_blocks(linear(), experts(name)) for name in (None, "triton", "deep_gemm", "cutlass"))


@pytest.mark.parametrize(
    "changed",
    [
        *(method(**{name: True}) for name in ("use_mxfp8", "use_marlin", "block_fp8_as_mxfp8", "is_fp4_expert")),
        *(method(block_quant=False), method(weight_block_size=[32, 32])),
        *(experts("flashinfer_trtllm"), experts("marlin")),
    ],
)
def test_other_methods_repack(changed):
    assert not keeps_fp8_blocks(linear(), changed)


def test_changed_scales_are_found():
    requantized, transposed, packed = linear(), linear(), linear()
    requantized.weight_scale_inv.format_ue8m0 = True
    transposed.weight_scale_inv.data = torch.ones(3, 2).t()
    packed.weight_scale_inv = nn.Parameter(torch.ones(2, 3, dtype=torch.int32), requires_grad=False)
    for module in (requantized, transposed, packed, nn.Module(), linear(_block_fp8_bf16_weight=torch.zeros(1))):
        assert not keeps_fp8_blocks(module, method())
