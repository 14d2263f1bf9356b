"""The pins of the GPU environment go together, as far as can be told from what is installed here."""

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
"""Older on GPUs than in cpu.txt, as the file says."""

EXTRAS = {"ray": "default"}


def pins(*files: str) -> dict[str, str]:
    """Package -> version; each file names a package once at most."""
    found: dict[str, str] = {}
    for file in files:
        for line in (REQUIREMENTS / file).read_text().splitlines():
            if re.match(r"[A-Za-z]", line) and " @ " not in line:
                name, version = line.split("==")
                assert canonicalize_name(name) not in found, f"{file}: {name} is there twice"
                found[canonicalize_name(name)] = version
    return found


def test_a_rehearsal_runs_what_the_cluster_runs():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    different = {name for name, version in cpu.items() if gpu.get(name) != version}
    assert different == HELD_BACK
    assert pins("gpu.txt", "dev.txt")  # which share no package


def needs(package: str, extra: str) -> list[Requirement]:
    """What an installed package asks for on a machine of this kind with `extra`."""
    listed = [Requirement(line) for line in distribution(package).requires or []]
    return [
        requirement
        for requirement in listed
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", extra))
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="GPU pins are for Linux")
def test_pins_are_what_installed_packages_ask_for():
    gpu = pins("gpu.txt", "gpu-build.txt", "dev.txt")
    checked = 0
    for package, version in gpu.items():
        try:
            if distribution(package).version != version:
                continue
        except PackageNotFoundError:
            continue
        for requirement in needs(package, EXTRAS.get(package, "")):
            pin = gpu.get(canonicalize_name(requirement.name))
            assert pin is not None, f"{package} needs {requirement}, gpu.txt has none"
            assert requirement.specifier.contains(pin, prereleases=True), f"{package} needs {requirement}, got {pin}"
            checked += 1
    assert checked > 100, checked


def test_transformer_engine_is_one_that_megatron_admits():
    gpu = pins("gpu.txt", "gpu-build.txt")
    parts = {name: version for name, version in gpu.items() if name.startswith("transformer-engine")}
    assert len(parts) == 3
    (version,) = set(parts.values())
    (admitted,) = [r for r in needs("megatron-core", "dev") if r.name == "transformer-engine"]
    assert admitted.specifier.contains(version)


def test_the_compiler_is_that_of_torch():
    gpu = pins("gpu.txt")
    release = gpu["cuda-toolkit"].rsplit(".", 2)[0]
    assert release == "13.0"
    for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-profiler-api", "cuda-runtime"):
        assert gpu[f"nvidia-{part}"].startswith(f"{release}."), part


def test_apex_is_pinned_to_a_commit():
    (apex,) = [line for line in (REQUIREMENTS / "gpu-build.txt").read_text().splitlines() if line.startswith("apex")]
    assert re.fullmatch(r"apex @ git\+https://github\.com/NVIDIA/apex@[0-9a-f]{40}", apex)
