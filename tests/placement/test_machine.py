from __future__ import annotations

from pathlib import Path

import pytest

from megarl.placement.machine import visible_gpus


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver that names two GPUs."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA A'\necho 'NVIDIA B'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []


def test_driver_that_fails(driver: Path) -> None:
    driver.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["NVIDIA A", "NVIDIA B"]),
        ("1", ["NVIDIA B"]),
        ("1,0", ["NVIDIA B", "NVIDIA A"]),
        ("7", []),
        ("", []),
        ("-1", []),
        ("GPU-0a1b", ["NVIDIA A"]),
    ],
)
def test_visible(driver: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, names: list[str]) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == names
