"""`make test-gpu` in an environment without Ray, SGLang and Transformer Engine, and without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import has_gpu_tests
from tests.time_limits import HANG_SECONDS

ROOT = Path(__file__).parents[1]

ABSENT = ("ray", "sglang", "sgl_kernel", "transformer_engine", "apex", "pyarrow", "scipy")
"""Packages that requirements/test-gpu.txt leaves out."""


def test_every_test_is_collected_without_other_packages_and_skipped_with_a_reason(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({ABSENT})\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = ["make", "-s", "test-gpu", f"PYTHON={sys.executable}", "VENV=", "ARGS=-q -p no:cacheprovider -p no:xdist"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"no test of GPUs has run: (\d+) skipped", done.stdout)
    assert counted is not None, done.stdout
    reasons = re.findall(r"^SKIPPED \[(\d+)\] \S+ (needs [12] CUDA devices?, found 0)$", done.stdout, re.MULTILINE)
    assert sum(int(count) for count, _ in reasons) == int(counted[1]) >= 100
    assert "error" not in done.stdout.lower()


BARE = (*ABSENT, "pydantic", "pydantic_core", "megatron", "transformers", "tokenizers", "safetensors", "yaml", "httpx")
"""Packages that an image with PyTorch may lack, of requirements/test-gpu.txt too."""

KERNEL_TESTS = ("tests/kernels", "tests/gpu/test_kernels.py")


def collected(*, hidden, folder, arguments=()):
    """Return the tests that `make test-gpu` collects where packages are hidden, and what it prints."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({hidden})\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    options = " ".join(("--collect-only -q -p no:cacheprovider -p no:xdist", *arguments))
    command = ["make", "-s", "test-gpu", f"PYTHON={sys.executable}", "VENV=", f"ARGS={options}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^tests/\S+::.*$", done.stdout, re.MULTILINE)), done.stdout


def test_every_test_of_kernels_is_collected_on_a_bare_machine(tmp_path):
    """Without pydantic and megatron-core; other files are skipped, and each says what it needs."""
    want, _ = collected(hidden=(), folder=tmp_path / "all", arguments=KERNEL_TESTS)
    found, printed = collected(hidden=BARE, folder=tmp_path / "bare")
    assert want <= found
    assert len(want) >= 44
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+: needs (\w+), which is not installed$", printed, re.MULTILINE)
    assert len(skipped) > 5
    assert set(skipped) <= set(BARE)
    assert "error" not in printed.lower()


def test_files_with_gpu_tests_are_recognized():
    assert has_gpu_tests("pytestmark = pytest.mark.gpu\n")
    assert has_gpu_tests('@pytest.mark.multigpu\n@pytest.mark.parametrize("device", [])\ndef test_it(device): ...\n')
    assert has_gpu_tests("def test_it(path, device):\n    pass\n")
    assert not has_gpu_tests("def test_it(path):\n    device = 1\n")
    assert not has_gpu_tests('@pytest.mark.parametrize(("device", "want"), [])\ndef test_it(device, want): ...\n')
