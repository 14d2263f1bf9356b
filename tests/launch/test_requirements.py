"""Tests that the pins of the GPU environment are consistent, as far as the installed packages show."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[2] / "requirements"

HELD_BACK = {"numpy", "python-dateutil"}
"""Packages that are older in gpu.txt than in cpu.txt, as explained in gpu.txt."""

EXTRAS = {"ray": "default"}


def read_pins(*files: str) -> dict[str, str]:
    """Return package -> version; assert that each package occurs at most once in all files."""
    found: dict[str, str] = {}
    for file in files:
        for line in (REQUIREMENTS / file).read_text().splitlines():
            if re.match(r"[A-Za-z]", line) and " @ " not in line:
                name, version = line.split("==")
                assert canonicalize_name(name) not in found, f"{file}: {name} is pinned twice"
                found[canonicalize_name(name)] = version
    return found


def test_cpu_and_gpu_pins_agree():
    cpu, gpu = read_pins("cpu.txt"), read_pins("gpu.txt")
    different = {name for name, version in cpu.items() if gpu.get(name) != version}
    assert different == HELD_BACK
    assert read_pins("gpu.txt", "dev.txt")  # asserts that they share no package


def find_requirements(package: str, extra: str) -> list[Requirement]:
    """Return the requirements of an installed package with `extra` on this platform."""
    listed = [Requirement(line) for line in distribution(package).requires or []]
    return [
        requirement
        for requirement in listed
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", extra))
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="GPU pins are for Linux")
def test_pins_satisfy_the_requirements_of_installed_packages():
    gpu = read_pins("gpu.txt", "gpu-build.txt", "dev.txt")
    checked = 0
    for package, version in gpu.items():
        try:
            if distribution(package).version != version:
                continue
        except PackageNotFoundError:
            continue
        for requirement in find_requirements(package, EXTRAS.get(package, "")):
            pin = gpu.get(canonicalize_name(requirement.name))
            assert pin is not None, f"{package} needs {requirement}, gpu.txt has none"
            assert requirement.specifier.contains(pin, prereleases=True), f"{package} needs {requirement}, got {pin}"
            checked += 1
    assert checked > 100, checked


def test_transformer_engine_version_is_supported_by_megatron_core():
    gpu = read_pins("gpu.txt", "gpu-build.txt")
    parts = {name: version for name, version in gpu.items() if name.startswith("transformer-engine")}
    assert len(parts) == 3
    (version,) = set(parts.values())
    (admitted,) = [r for r in find_requirements("megatron-core", "dev") if r.name == "transformer-engine"]
    assert admitted.specifier.contains(version)


def test_cuda_compiler_has_the_version_of_torch():
    gpu = read_pins("gpu.txt")
    release = gpu["cuda-toolkit"].rsplit(".", 2)[0]
    assert release == "13.0"
    for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-profiler-api", "cuda-runtime"):
        assert gpu[f"nvidia-{part}"].startswith(f"{release}."), part


def test_apex_is_pinned_to_a_commit():
    (apex,) = [line for line in (REQUIREMENTS / "gpu-build.txt").read_text().splitlines() if line.startswith("apex")]
    assert re.fullmatch(r"apex @ git\+https://github\.com/NVIDIA/apex@[0-9a-f]{40}", apex)
