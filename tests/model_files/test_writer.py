"""Writing model folders: file contents, the index, file assignment and incomplete folders."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megarl.errors import DataError
from megarl.model_files import tensor_io
from megarl.model_files.file_plan import assign_files, plan_files
from megarl.model_files.tensor_io import SafetensorsWriter, publish
from tests.errors import expect_error


def specs_of(tensors):
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


def quarters(shape):
    """Return boxes that cover the tensor: halves of its first two dimensions."""
    spans = [[(0, n // 2), (n // 2, n)] if dim < 2 else [(0, n)] for dim, n in enumerate(shape)]
    boxes = [()]
    for span in spans:
        boxes = [(*box, pair) for box in boxes for pair in span]
    return boxes


def write_all(folder, files, tensors):
    out = SafetensorsWriter(folder, files)
    for file in files:
        for name in file.tensors:
            for box in quarters(tensors[name].shape):
                out.write(name, box, tensors[name][tuple(slice(*pair) for pair in box)])
    out.finish()


@pytest.fixture(params=[4, 2**21])
def chunk_elements(request, monkeypatch):
    monkeypatch.setattr(tensor_io, "CHUNK_ELEMENTS", request.param)


MIXED = {
    "b.weight": torch.randn(6, 10),
    "a.weight": torch.randn(5, 3).bfloat16(),
    "é": torch.randn(7).half(),
    "c": torch.randn(4, 3, 5),
    "count": torch.tensor(3),
    "raw": torch.randn(3, 3).to(torch.float8_e4m3fn),
}


@pytest.mark.usefixtures("chunk_elements")
def test_a_file_equals_that_of_safetensors_byte_for_byte(tmp_path):
    (tmp_path / "ours").mkdir()
    files = plan_files(tmp_path / "ours", [specs_of(MIXED)], 10**6)
    write_all(tmp_path / "ours", files, MIXED)
    publish(tmp_path / "ours", files)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["model.safetensors"]
    save_file(MIXED, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    got, want = ((tmp_path / path).read_bytes() for path in ("ours/model.safetensors", "theirs.safetensors"))
    assert files[0].num_bytes == len(got)
    assert got == want


def test_several_files_get_an_index(tmp_path):
    tensors = {f"w{i}": torch.randn(4, 8) for i in range(5)} | {"large": torch.randn(40, 8)}
    files = plan_files(tmp_path, [specs_of(tensors)], 2 * 4 * 8 * 4)
    assert [list(file.tensors) for file in files] == [["w0", "w1"], ["w2", "w3"], ["w4"], ["large"]]
    write_all(tmp_path, files[:2], tensors)  # as two processes would
    write_all(tmp_path, files[2:], tensors)
    publish(tmp_path, files)
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert torch.equal(opened.get_tensor(name), tensors[name])


def test_groups_share_a_file_only_if_all_fit_into_one(tmp_path):
    groups = [{"a": ((4,), "float32"), "b": ((4,), "float32")}, {"c": ((2,), "float32")}]
    assert [list(file.tensors) for file in plan_files(tmp_path, groups, 40)] == [["a", "b", "c"]]
    assert [list(file.tensors) for file in plan_files(tmp_path, groups, 39)] == [["a", "b"], ["c"]]


def test_files_are_assigned_evenly_and_to_the_processes_that_hold_them(tmp_path):
    groups = [{f"{stage}.{i}": ((16,), "float32") for i in range(4)} for stage in range(2)]
    files = plan_files(tmp_path, groups, 64)
    stages = [dict.fromkeys(group, 64) for group in groups]
    assert assign_files(files, stages) == [0] * 4 + [1] * 4
    assert assign_files(files, stages * 2).count(3) == 2  # two replicas
    halves = [{name: 32 for group in groups for name in group}] * 2
    assert sorted(assign_files(files, halves)) == [0] * 4 + [1] * 4
    assert sorted(assign_files(files, [stages[0] | stages[1], {}])) == [0] * 5 + [1] * 3
    assert assign_files(files, [{}, {}]).count(0) == 4


def test_an_incomplete_tensor_is_reported(tmp_path):
    files = plan_files(tmp_path, [{"w": ((4, 2), "float32")}], 100)
    out = SafetensorsWriter(tmp_path, files)
    out.write("w", ((0, 3), (0, 2)), torch.zeros(3, 2))
    with expect_error(DataError, "model.safetensors", "32", "24"):
        out.finish()
    out.discard()
    assert list(tmp_path.iterdir()) == []


def test_existing_weights_are_replaced_only_when_all_files_exist(tmp_path):
    before = {"w": torch.ones(4)}
    save_file(before, tmp_path / "model.safetensors")
    files = plan_files(tmp_path, [{"w": ((4,), "float32")}, {"v": ((4,), "float32")}], 16)
    write_all(tmp_path, files[:1], {"w": torch.zeros(4)})
    with expect_error(DataError, "model-00002-of-00002.safetensors.partial", "0"):
        publish(tmp_path, files)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], before["w"])
    write_all(tmp_path, files[1:], {"v": torch.zeros(4)})
    (tmp_path / ".model-00009-of-00009.safetensors.partial").touch()
    publish(tmp_path, files)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]


def test_a_full_disk_raises(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    out = SafetensorsWriter(tmp_path, plan_files(tmp_path, [{"w": ((4,), "float32")}], 100))
    out._handles["model.safetensors"] = os.open("/dev/full", os.O_WRONLY)
    with expect_error(OSError, "No", "device", "space"):
        out.write("w", ((0, 4),), torch.zeros(4))
    out.discard()
