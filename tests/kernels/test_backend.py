"""Which ops run their Triton kernels."""

import pytest
import torch

from megarl_kernels import backend


class Cuda:
    """What `uses_triton` reads of a tensor on a GPU."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch):
    monkeypatch.setattr(backend, "triton", object())
    for name in ("MEGARL_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


def test_kernels_run_on_cuda(monkeypatch):
    assert backend.uses_triton(Cuda())
    assert not backend.uses_triton(Cuda(torch.float64))
    assert not backend.uses_triton(torch.zeros(1))
    monkeypatch.setattr(backend, "triton", None)
    assert not backend.uses_triton(Cuda())


def test_interpreter_runs_them_on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.uses_triton(torch.zeros(1))


def test_variable_turns_them_off(monkeypatch):
    monkeypatch.setenv("MEGARL_KERNELS", "torch")
    assert not backend.uses_triton(Cuda())
    monkeypatch.setenv("MEGARL_KERNELS", "cuda")
    with pytest.raises(ValueError, match="MEGARL_KERNELS needs to be auto or torch, got 'cuda'"):
        backend.uses_triton(Cuda())
