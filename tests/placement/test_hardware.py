from __future__ import annotations

from pathlib import Path

import pytest

from megarl.placement.hardware import Gpu, free_shared_memory, gpus, package_version, visible_gpus


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver that names two GPUs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "--query-gpu=index,driver_version,memory.total,memory.used,name --format=csv,noheader,nounits" ] '
        "|| exit 2\n"
        "echo '0, 570.86.15, 81559, 4, NVIDIA A'\n"
        "echo '1, 570.86.15, [N/A], [N/A], NVIDIA B, as they call it'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []


def test_driver_that_fails(driver: Path) -> None:
    driver.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert gpus() == []


def test_what_the_driver_says_of_them(driver: Path) -> None:
    first, second = gpus()
    assert first == Gpu(index=0, name="NVIDIA A", driver="570.86.15", memory_bytes=81559 * 2**20, used_bytes=4 * 2**20)
    assert (second.name, second.memory_bytes, second.used_bytes) == ("NVIDIA B, as they call it", None, None)


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("7", []), ("", []), ("-1", []), ("GPU-0a1b", [0])],
)
def test_visible(driver: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, indices: list[int]) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.index for gpu in gpus()] == indices
    assert visible_gpus() == [gpu.name for gpu in gpus()]


def test_packages_and_shared_memory() -> None:
    assert package_version("pytest") == pytest.__version__
    assert package_version("no-such-package") is None
    shared = free_shared_memory()
    assert shared is None or shared >= 0
