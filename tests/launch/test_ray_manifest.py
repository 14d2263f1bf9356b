"""Tests that launch/ray/rayjob.yaml requests the resources that its run needs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import RunConfig, load_config
from tests.packaging.test_requirements import read_pins

ROOT = Path(__file__).parents[2]

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


def test_image_has_the_repository_at_image_root():
    assert f"WORKDIR {IMAGE_ROOT}\n" in (ROOT / "launch" / "docker" / "Dockerfile").read_text()


def test_paths_are_in_the_image_or_on_the_shared_volume(spec, config):
    mounts = {mount["mountPath"] for pod in pods(spec) for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/dev/shm", "/shared"}
    for path in (config.run_dir, config.export_path, config.model.path):
        assert Path(path).is_relative_to("/shared"), path
    assert (ROOT / Path(config.data.path).relative_to(IMAGE_ROOT)).exists()


def test_worker_group_matches_the_placement_of_the_run(spec, config):
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == config.placement.nodes
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) == config.placement.slots_per_node
    assert int(resources["limits"]["cpu"]) >= config.placement.slots_per_node


def test_head_has_no_gpus(spec):
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_shared_memory_fits_the_memory_limit_of_the_pod(spec):
    def gibibytes(size: str) -> int:
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
