"""Tests that pins and the metadata of megarl are consistent with each other and with the installed packages."""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    assert read_pins("triton.txt") == {"triton": gpu["triton"]}
    assert read_pins("templates.txt").items() <= read_pins("../benchmarks/end_to_end/trl.txt").items()
    for environment in ("cpu.txt", "gpu.txt"):
        assert read_pins(environment, "dev.txt", "docs.txt")  # asserts that they share no package


def test_pins_of_gpu_tests_are_those_of_the_gpu_environment():
    tests, environment = read_pins("test-gpu.txt"), read_pins("gpu.txt", "dev.txt")
    assert tests.items() <= environment.items()
    assert not tests.keys() & {"torch", "triton", "ray", "sglang", "transformer-engine"}
    for package in tests:
        for requirement in find_requirements(package, ""):
            name = canonicalize_name(requirement.name)
            assert name in tests or name == "torch", f"{package} needs {requirement}, test-gpu.txt has none"


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
    gpu = read_pins("gpu.txt", "gpu-build.txt", "dev.txt", "docs.txt")
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
    (admitted,) = [r for r in find_requirements("megatron-core", "te") if r.name == "transformer-engine"]
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


@pytest.mark.parametrize(
    ("extra", "pinned"), [("cpu", ("cpu.txt", "torch.txt")), ("gpu", ("gpu.txt", "gpu-build.txt"))]
)
def test_pins_satisfy_the_metadata_of_megarl(extra, pinned):
    pins = read_pins(*pinned)
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]:
        requirement = Requirement(line)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{line} has no pin in {pinned}"
        assert requirement.specifier.contains(version), f"{line} excludes the pin {version}"


def test_both_extras_name_the_same_engine():
    extras = PROJECT["optional-dependencies"]
    assert extras["cpu"][0] == extras["gpu"][0] == f"sglang=={read_pins('cpu.txt')['sglang']}"


OPTIONAL = {"fastapi", "sglang", "tqdm", "transformer_engine", "triton", "wandb"}
"""Modules that megarl imports only where they are installed, or that its extras install, such as SGLang's own."""


def test_every_imported_package_is_a_dependency():
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    providers = packages_distributions()
    undeclared = set()
    for file in (*(ROOT / "megarl").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")):
        if "stubs" in file.parts:
            continue
        for module in imported_modules(file):
            names = {canonicalize_name(name) for name in providers.get(module, [module])}
            if module not in {"megarl", "megarl_kernels", *sys.stdlib_module_names, *OPTIONAL} and not names & declared:
                undeclared.add(f"{file.relative_to(ROOT)} imports {module}")
    assert undeclared == set()


def imported_modules(file: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found
