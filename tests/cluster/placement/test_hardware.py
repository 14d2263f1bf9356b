"""Hardware queries of this node, and the table of GPU types."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.placement.hardware import (
    GPU_TYPES,
    Gpu,
    find_gpu_type,
    free_shared_memory,
    list_gpus,
    package_version,
    visible_gpu_names,
)

UUIDS = ("GPU-0a1b2c3d-0000-1111-2222-333344445555", "GPU-0a1b9999-0000-1111-2222-333344445555")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """An nvidia-smi that reports two GPUs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "--query-gpu=index,uuid,driver_version,memory.total,memory.used,name '
        '--format=csv,noheader,nounits" ] || exit 2\n'
        f"echo '0, {UUIDS[0]}, 570.86.15, 81559, 4, NVIDIA A'\n"
        f"echo '1, {UUIDS[1]}, 570.86.15, [N/A], [N/A], NVIDIA B, as they call it'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def test_without_a_driver_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


def test_gpus_as_the_driver_reports_them(driver):
    first, second = list_gpus()
    sizes = {"memory_bytes": 81559 * 2**20, "used_bytes": 4 * 2**20}
    assert first == Gpu(index=0, uuid=UUIDS[0], name="NVIDIA A", driver="570.86.15", **sizes)
    assert (second.name, second.memory_bytes, second.used_bytes) == ("NVIDIA B, as they call it", None, None)
    driver.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert list_gpus() == []


@pytest.mark.parametrize(("visible_devices", "indices"), [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("7", [])])
def test_cuda_visible_devices_selects_gpus(driver, monkeypatch, visible_devices, indices):
    if visible_devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    assert [gpu.index for gpu in list_gpus()] == indices
    assert visible_gpu_names() == [gpu.name for gpu in list_gpus()]


VALUES = (
    "", " ", "0", "1,0", "0,1,2", "-1", "0,-1,1", "0,9,1", "0,0", "0,9,0", "0,-1,0", "1a,0b", "+1", "-0,1", " 1 , 0",
    "1 0", "0x1", "00,1", "NoDevFiles", "none", "void", "0,none,1", ",0", "0,,1", "0;1", "99999999999999999999,0",
    "GPU-", "GPU-0a1b2", "GPU-0a1b9,GPU-0a1b2", "GPU-0a1b", "GPU-0a1b2,GPU-0a1b,GPU-0a1b9", "GPU-0a1b2,GPU-0a1b2c",
    "GPU-0a1b2,GPU-0a1b2", "GPU-0a1b2,GPU-f,GPU-0a1b2", "GPU-f,GPU-0a1b2", "GPU-0a1b2,1", "1,GPU-0a1b2", "gpu-0a1b2",
    "GPU-0A1B2", " GPU-0a1b2", UUIDS[1], f"{UUIDS[1]},{UUIDS[0]}", f"{UUIDS[0]}x",
)  # fmt: skip
"""Values of CUDA_VISIBLE_DEVICES, among them those that Slurm and containers set."""


@pytest.mark.parametrize("value", VALUES)
def test_values_of_cuda_visible_devices_are_read_as_torch_reads_them(driver, monkeypatch, value):
    # torch repeats the parser of CUDA's driver, to count devices without starting CUDA
    import torch.cuda as cuda

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
    monkeypatch.setattr(cuda, "_raw_device_uuid_nvml", lambda: list(UUIDS))
    parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = cuda._transform_uuid_to_ordinals(parsed, list(UUIDS))
    assert [gpu.index for gpu in list_gpus()] == parsed[: cuda._device_count_nvml()]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (f"MIG-{UUIDS[1]}/1/0", [1]),
        (f"MIG-{UUIDS[1]}/1/0,MIG-{UUIDS[0]}/1/0", [1]),
        ("MIG-GPU-ffffffff-0000-1111-2222-333344445555/1/0", []),
        ("MIG-c7384736-a75d-5afc-978f-d2f1294409fd,MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d", [0]),
    ],
)
def test_one_mig_instance_is_visible_with_unknown_memory(driver, monkeypatch, value, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = list_gpus()
    assert [gpu.index for gpu in found] == indices
    assert [gpu.memory_bytes for gpu in found] == [None] * len(indices)


def test_package_versions():
    assert package_version("pytest") == pytest.__version__
    assert package_version("no-such-package") is None


def test_free_shared_memory(monkeypatch):
    seen = []

    def disk_usage(folder):
        seen.append(folder)
        return SimpleNamespace(total=9, used=4, free=5)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    assert free_shared_memory() == 5
    assert seen == [Path("/dev/shm")]
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    assert free_shared_memory() is None


@pytest.mark.gpu
def test_listed_gpus_are_those_of_torch():
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert visible_gpu_names() == names
    assert all(gpu.memory_bytes for gpu in list_gpus())


NAMES = ("H100 PCIe", "H100 NVL", "H200", "H20", "GB200", "B200", "A100-SXM4-80GB", "A10", "L4", "L40S")
"""Names that CUDA reports after `NVIDIA`, and the table lists as they are."""


@pytest.mark.parametrize(
    ("reported", "listed"),
    [
        *((f"NVIDIA {name}", name) for name in NAMES),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_type_is_found_by_the_name_that_cuda_reports(reported, listed):
    found = find_gpu_type(reported)
    assert (None if found is None else found.reported) == listed


def test_names_have_the_size_of_the_memory():
    named = [gpu for gpu in GPU_TYPES if gpu.name]
    assert len({gpu.name for gpu in named}) == len(named) > 8
    for gpu in named:
        assert 0.95 * int(gpu.name.split("-")[1]) < gpu.mebibytes / 1024 * 1.0738 < 1.08 * int(gpu.name.split("-")[1])
    assert all(not gpu.mebibytes for gpu in GPU_TYPES if not gpu.name)
