"""Which ops run Triton kernels; Triton without a GPU: its interpreter and its compiler on all kernels."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.engines.sglang.engine_environment import make_engine_environment
from megarl_kernels import backend
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS


def cuda(dtype=torch.bfloat16):
    """Return what `uses_triton` reads of a tensor on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(backend, "triton", object())
    for name in ("MEGARL_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_kernels_run_on_cuda(with_triton):
    assert backend.uses_triton(cuda())
    assert not backend.uses_triton(cuda(torch.float64))
    assert not backend.uses_triton(torch.zeros(1))
    with_triton.setattr(backend, "triton", None)
    assert not backend.uses_triton(cuda())


def test_variables_choose_the_interpreter_or_torch(with_triton):
    with_triton.setenv("TRITON_INTERPRET", "1")
    assert backend.uses_triton(torch.zeros(1))
    with_triton.delenv("TRITON_INTERPRET")
    with_triton.setenv("MEGARL_KERNELS", "torch")
    assert not backend.uses_triton(cuda())
    with_triton.setenv("MEGARL_KERNELS", "cuda")
    with expect_error(ValueError, "MEGARL_KERNELS", "'cuda'"):
        backend.uses_triton(cuda())


ROOT = Path(__file__).parents[2]
TRITON_FOLDER = Path(sys.prefix) / "triton"
"""Where `make test` puts Triton: outside of the packages of trainers and engines, which would find it there."""

KERNELS = {
    "logprob_entropy": ("statistics", "gradient"),
    "fp8_block": ("quantize", "dequantize", "maxima", "encode"),
    "reverse_scan": ("block_heads", "scan"),
}
"""Names of the kernels, by module."""


def run_with_triton(*arguments: str, **variables: str) -> str:
    """Return what `python -m` printed, in a process that finds Triton."""
    if importlib.util.find_spec("triton") is None and not TRITON_FOLDER.is_dir():
        pytest.skip(f"needs Triton, as `make test` installs it in {TRITON_FOLDER}")
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(TRITON_FOLDER)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join(folders)} | variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_in_the_interpreter():
    options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs")
    out = run_with_triton("pytest", *options, "tests/kernels/test_triton_kernels.py", TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed[1]) >= 35
    assert "skipped" not in out


def test_kernels_compile_for_a_gpu(tmp_path):
    """For an H100: what the interpreter accepts may not compile."""
    out = run_with_triton("tests.kernels.compile_kernels", "90", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    compiled = [json.loads(line) for line in out.splitlines()]
    want = {f"{module}._{name}_kernel" for module, names in KERNELS.items() for name in names}
    assert {line["kernel"] for line in compiled} == want
    limit = 163 * 1024  # what a program may use on an A100; an H100 has more
    assert all(line["code_bytes"] > 0 and line["shared_bytes"] <= limit for line in compiled)
    # three programs of 256 threads fit a multiprocessor, which hides how long a memory access takes
    scores = [line for line in compiled if line["kernel"].startswith("logprob_entropy.")]
    assert all(line["registers"] <= 2**16 // (3 * 256) and not line["spilled_bytes"] for line in scores), scores


def test_engines_on_a_cpu_import_the_stub_and_not_triton(monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise ImportError('not the stub')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = {**os.environ, **make_engine_environment("cpu", 1)}
    subprocess.run([sys.executable, "-c", "import triton; triton.jit"], env=environment, check=True)
