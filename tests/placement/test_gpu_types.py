"""The table of GPUs: types by the names that CUDA reports, and memory by the names that `megarl check` takes."""

from __future__ import annotations

import pytest

from megarl.placement.gpu_types import GPU_TYPES, find_gpu_type


@pytest.mark.parametrize(
    ("reported", "listed"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_type_is_found_by_the_name_that_cuda_reports(reported: str, listed: str | None) -> None:
    found = find_gpu_type(reported)
    assert (None if found is None else found.reported) == listed


def test_names_have_the_size_of_the_memory() -> None:
    named = [gpu for gpu in GPU_TYPES if gpu.name]
    assert len({gpu.name for gpu in named}) == len(named) > 8
    for gpu in named:
        assert 0.95 * int(gpu.name.split("-")[1]) < gpu.mebibytes / 1024 * 1.0738 < 1.08 * int(gpu.name.split("-")[1])
    assert all(not gpu.mebibytes for gpu in GPU_TYPES if not gpu.name)
