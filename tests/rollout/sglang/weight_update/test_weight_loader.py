"""The custom weight loader on a small model, without SGLang."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megarl.reshard.transfer.bucket import SharedBuffer, lay_out
from megarl.rollout.sglang.weight_update import weight_loader
from megarl.rollout.sglang.weight_update.messages import (
    dump_command,
    read_reply,
    reply_path,
    write_command,
)


class Engine(nn.Module):
    """Loads by name, as SGLang's models do."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4))
        self.fails = False

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            if self.fails:
                raise RuntimeError("out of memory")


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(weight_loader, "_tp_rank", lambda: 1)
    monkeypatch.setattr(weight_loader, "_tp_group", lambda: None)
    return Engine()


@pytest.fixture
def command(tmp_path):
    """Makes commands to write `a` and `b` from a bucket."""
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    buffers = []

    def make(**tensors):
        slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
        buffers.append(SharedBuffer(num_bytes))
        for slot in slots:
            buffers[-1].view(slot).copy_(tensors[slot.name])
        bucket = buffers[-1].describe(slots)
        return write_command(bucket, str(tmp_path), "float32") | {"reply": str(tmp_path / "reply")}

    yield make
    for buffer in buffers:
        buffer.close()


def execute(model, command):
    placeholder = torch.empty(0)
    weight_loader.load(model, [(json.loads(json.dumps(command)), placeholder)])
    return read_reply(reply_path(command["reply"], 1))


def test_valid_bucket_is_written(model, command):
    reply = execute(model, command(a=torch.ones(4), b=torch.full((4,), 2.0)))
    assert (reply.rank, reply.error, reply.wrote) == (1, None, True)
    assert model.a.tolist() == [1.0] * 4
    assert model.b.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("tensors", "change", "error"),
    [
        ({"c": torch.ones(4), "b": torch.ones(5)}, {}, "c is no tensor of the model; b needs shape [4], got [5]"),
        ({}, {"path": "/gone"}, "FileNotFoundError"),
        ({}, {"num_bytes": 40_960_000}, "needs 40960000 bytes, got 4096"),
    ],
    ids=["tensors", "path", "size"],
)
def test_invalid_bucket_is_rejected_completely(model, command, tensors, change, error):
    invalid = command(a=torch.ones(4), **tensors)
    invalid["bucket"] |= change
    reply = execute(model, invalid)
    assert not reply.wrote
    assert error in reply.error
    assert model.a.tolist() == [0.0] * 4


def test_failure_during_the_write_is_reported(model, command):
    model.fails = True
    reply = execute(model, command(a=torch.ones(4)))
    assert (reply.wrote, reply.error) == (True, "RuntimeError: out of memory")


def test_unknown_operation_replies_with_an_error(model, command):
    reply = execute(model, command(a=torch.ones(4)) | {"op": "nonsense"})
    assert reply.error == "KeyError: 'nonsense'"


def test_missing_reply_if_it_cannot_be_written(model, command, tmp_path):
    assert execute(model, command(a=torch.ones(4)) | {"reply": str(tmp_path / "missing" / "reply")}) is None


def test_dump_saves_parameters_by_name(model, tmp_path):
    execute(model, dump_command(str(tmp_path)) | {"reply": str(tmp_path / "reply")})
    assert torch.load(tmp_path / "rank1.pt").keys() == {"a", "b"}
    assert torch.load(tmp_path / "rank1.buffers.pt").keys() == set()
