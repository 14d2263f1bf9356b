"""Tests of the files in launch/: Dockerfile, manifest of a Ray job, and shell scripts."""

import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import RunConfig, load_config
from tests.end_to_end.launched import run_program
from tests.packaging.test_requirements import read_pins
from tests.required_tools import skip_or_fail

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "launch" / "docker" / "Dockerfile"


def read_instructions() -> list[tuple[str, str]]:
    """Return the instructions in order, as pairs (name, arguments on one line)."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, rest in (line.split(None, 1) for line in joined.splitlines() if line)]


def instructions_of(kind: str) -> list[str]:
    return [rest for word, rest in read_instructions() if word == kind]


def test_all_instructions_are_known_and_the_base_image_is_an_nvidia_pytorch_release():
    known = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD"}
    assert {word for word, _ in read_instructions()} == known
    (base,) = instructions_of("FROM")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)


@pytest.mark.parametrize("source", [source for copy in instructions_of("COPY") for source in copy.split()[:-1]])
def test_copied_files_exist_and_are_not_ignored(source):
    listed = subprocess.run(["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"needs a git checkout that this user may read: {listed.stderr.strip()}")
    tracked = listed.stdout.splitlines()
    assert tracked
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()[1:]]
    hidden = {path for path in tracked for part in path.split("/") if any(fnmatch(part, name) for name in ignored)}
    assert hidden == set()


def test_versions_are_pinned_only_in_requirements():
    assert "==" not in "".join(rest for _, rest in read_instructions())
    release = read_pins("gpu.txt")["cuda-toolkit"].rsplit(".", 2)[0]
    assert f"with the same CUDA ({release})" in DOCKERFILE.read_text().replace("\n# ", " ")


def test_python_version_is_supported_by_the_pins():
    named = {version for run in instructions_of("RUN") for version in re.findall(r"PYTHON=python(3\.\d+)", run)}
    assert len(named) == 1
    assert named.pop() in re.findall(r"3\.\d+", (ROOT / "requirements" / "gpu.txt").read_text().split("\n", 1)[0])


@pytest.mark.parametrize("run", instructions_of("RUN"))
def test_run_commands_are_valid_shell(run):
    subprocess.run(["sh", "-n", "-c", run], check=True)


def test_packages_and_megarl_are_installed_in_two_layers(tmp_path):
    targets = [target for run in instructions_of("RUN") for target in re.findall(r"make ([a-z-]+) PYTHON=", run)]
    plans = [plan_make(target, ROOT, tmp_path) for target in targets]
    assert targets == ["packages-gpu", "setup-gpu"]
    assert ["-r requirements/gpu-build.txt" in each for each in plans] == [True, True]
    assert ["-e ." in each for each in plans] == [False, True]


def test_packages_layer_needs_only_files_copied_before_it(tmp_path):
    """In the image, packages are built from Makefile and requirements only."""
    names = [word for word, _ in read_instructions()]
    last_copy = len(names) - names[::-1].index("COPY") - 1
    before = [rest for word, rest in read_instructions()[:last_copy] if word == "COPY"]
    assert [copy.split()[0] for copy in before] == ["Makefile", "requirements"]
    for name in ("Makefile", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert "-r requirements/gpu.txt" in plan_make("packages-gpu", tmp_path, tmp_path / "venv")


def plan_make(target: str, folder: Path, venv: Path) -> str:
    """Return the commands that make would run in `folder`."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    make = ["make", "-n", target, f"VENV={venv}"]
    return subprocess.run(make, cwd=folder, capture_output=True, text=True, check=True).stdout


IMAGE_ROOT = "/opt/megarl"
"""Folder of the repository in the image."""


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "launch" / "ray" / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest["spec"]


@pytest.fixture(scope="module")
def config(spec: dict[str, Any]) -> RunConfig:
    """Configuration of the run that the entrypoint starts."""
    megarl, train, path, flag, *overrides = shlex.split(spec["entrypoint"])
    assert (megarl, train, flag) == ("megarl", "train", "--set")
    return load_config(RunConfig, ROOT / Path(path).relative_to(IMAGE_ROOT), overrides)


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_paths_are_in_the_image_or_on_the_shared_volume(spec, config):
    assert f"WORKDIR {IMAGE_ROOT}\n" in DOCKERFILE.read_text()
    mounts = {mount["mountPath"] for pod in pods(spec) for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/dev/shm", "/shared"}
    for path in (config.run_dir, config.export_path, config.model.path):
        assert Path(path).is_relative_to("/shared"), path
    assert (ROOT / Path(config.data.path).relative_to(IMAGE_ROOT)).exists()


def test_worker_group_matches_the_placement_of_the_run_and_head_has_no_gpus(spec, config):
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == config.placement.nodes
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) == config.placement.slots_per_node
    assert int(resources["limits"]["cpu"]) >= config.placement.slots_per_node

    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_shared_memory_fits_the_memory_limit_of_the_pod(spec):
    def gibibytes(size):
        assert size.endswith("Gi")
        return int(size[:-2])

    for pod in pods(spec):
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert gibibytes(shm["sizeLimit"]) <= gibibytes(container["resources"]["limits"]["memory"]) // 2


def test_all_pods_have_the_same_image_user_and_ray(spec):
    containers = [pod["containers"][0] for pod in pods(spec)]
    assert len({container["image"] for container in containers}) == 1
    assert len({str(pod["securityContext"]) for pod in pods(spec)}) == 1
    assert spec["rayClusterSpec"]["rayVersion"] == read_pins("gpu.txt")["ray"]


def test_finished_run_releases_its_nodes(spec):
    assert spec["shutdownAfterJobFinishes"] is True
    assert 0 <= spec["ttlSecondsAfterFinished"] <= 60
    assert spec["backoffLimit"] == 0


def test_labels_are_accepted_by_ray(spec):
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    for key, value in group["labels"].items():
        assert re.fullmatch(r"(?!ray\.io/)[a-z0-9][a-z0-9.-]*(/[\w.-]+)?", key)
        assert re.fullmatch(r"[\w.-]{1,63}", value)


SCRIPTS = sorted(
    path
    for name in ("launch", "examples", "requirements")
    for path in (ROOT / name).rglob("*")
    if path.suffix in {".sh", ".sbatch"}
)


def test_shellcheck_finds_no_problems():
    if shutil.which("shellcheck") is None:
        skip_or_fail("needs shellcheck: make setup-test-tools")
    assert SCRIPTS
    done = run_program("shellcheck", "--external-sources", *SCRIPTS, cwd=ROOT)
    assert done.returncode == 0, done.stdout
