"""The platform of trainer ranks, CUDA and NCCL or the CPU and gloo, and the timer of GPU work."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.runtime.platform import CudaTimer
from tests.megatron.rank_models import make_model, model_spec
from tests.megatron.ranks import run_ranks


def describe_platform():
    from megarl.megatron.runtime import platform

    platform.prepare()
    return {
        "is_cuda": platform.is_cuda(),
        "backend": platform.backend(),
        "device": str(platform.device()),
        "created": str(torch.zeros(1, device="cuda").device),  # as megatron-core creates tensors
        "transformer_engine": platform.uses_transformer_engine(),
    }


def test_platform_follows_the_device(device, tmp_path):
    cuda = device == "cuda"
    assert run_ranks(describe_platform, 1, tmp_path, device=device) == {
        "is_cuda": cuda,
        "backend": "nccl" if cuda else "gloo",
        "device": "cuda:0" if cuda else "cpu",
        "created": "cuda:0" if cuda else "cpu",
        "transformer_engine": cuda and find_spec("transformer_engine") is not None,
    }


def describe_model(path):
    import torch.distributed as dist

    model = make_model(model_spec(path, dtype="bfloat16"))
    classes = {type(module).__module__ for chunk in model.chunks for module in chunk.module.modules()}
    return dist.get_backend(), {t.device.type for t in model.tensors().values()}, classes


def test_weights_are_on_the_device(device, model_folder, tmp_path):
    backend, devices, _ = run_ranks(describe_model, 1, tmp_path, model_folder("qwen3"), device=device)
    assert devices == {device}
    assert backend == ("nccl" if device == "cuda" else "gloo")


@pytest.mark.gpu
def test_layers_come_from_transformer_engine(model_folder, tmp_path):
    pytest.importorskip("transformer_engine")
    _, _, modules = run_ranks(describe_model, 1, tmp_path, model_folder("qwen3"), device="cuda")
    assert "megatron.core.extensions.transformer_engine" in modules
    assert "megarl.megatron.modeling.torch_layers" not in modules


def test_kernel_package_that_needs_a_driver_is_not_imported_on_cpu(tmp_path):
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    code = (
        "from megarl.megatron.runtime import platform; platform.prepare(); "
        "from megatron.core.transformer import attention; print(attention.HAVE_FMLA)"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH"), str(Path.cwd())]))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


class FakeEvent:
    """An event of a GPU whose clock is `now`, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, other: Any) -> float:
        return float(other.at - self.at)


def test_only_time_within_blocks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = CudaTimer()
    assert timer.seconds() == 0.0
    for _ in range(2):
        with timer.measure():
            FakeEvent.now += 250.0
        FakeEvent.now += 1000.0
    assert timer.seconds() == 0.5
    with pytest.raises(ValueError, match="failed"), timer.measure():
        raise ValueError("failed")
    with timer.measure():
        FakeEvent.now += 125.0
    assert timer.seconds() == 0.625


@pytest.mark.gpu
def test_kernels_that_the_host_does_not_wait_for_count_and_idle_time_does_not() -> None:
    matrix, timer, seconds = torch.ones(4096, 4096, device="cuda"), CudaTimer(), 0.0

    def multiply() -> None:
        for _ in range(50):
            matrix @ matrix

    multiply()
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10**9)  # the host is ahead of the device until the end, however busy it is
        begin.record()
        with timer.measure():
            multiply()
        end.record()
        torch.cuda.synchronize()
        seconds += begin.elapsed_time(end) / 1000
    assert timer.seconds() == pytest.approx(seconds, rel=0.05)
