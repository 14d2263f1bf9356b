"""Fixtures for all tests: one local Ray cluster per session."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from megarl.text import map_text, replace_surrogates
from tests.distribution import position, scope
from tests.maintenance.repeat_failed import EXIT_STATUS

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

CLUSTER_SLOTS = 6

# torch looks up the name of every address that it connects to, which takes 5 s if the name server does not answer; set
# before the first lookup, and inherited by all processes
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Ray's default niceness of 15 starves its workers while other processes use all cores
os.environ.setdefault("RAY_worker_niceness", "0")

# no time limit for an example, or for making one: processes share the cores with others
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# the same examples in every run; `--hypothesis-profile random` draws new ones
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # SIGINT is ignored in background jobs of a shell; the children of tests would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Distribute the tests as `tests/distribution.py` says."""
    from xdist.scheduler import LoadScopeScheduling

    class Schedule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return Schedule(config, log)


GPU_MARKS = re.compile(r"gpu( or multigpu)?")
"""Values of `-m` that choose tests of GPUs only."""

GPU_MARK = re.compile(r"\bmark\.(multi)?gpu\b")
DEVICE_FIXTURE = re.compile(r"^def test_\w+\([^)]*\bdevice\b", re.MULTILINE)
DEVICE_PARAMETER = re.compile(r"\.parametrize\([^)]*\"device\"")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files and folders with tests of GPUs where those are chosen: most others need Ray or SGLang."""
    if not GPU_MARKS.fullmatch(config.option.markexpr):
        return None
    if collection_path.is_dir():
        files = collection_path.rglob("test_*.py")
    elif collection_path.suffix == ".py":
        files = iter([collection_path])
    else:
        return None
    return None if any(has_gpu_tests(file.read_text()) for file in files) else True


def has_gpu_tests(source: str) -> bool:
    """Return whether a file of tests has a mark of GPUs, or tests that the fixture `device` runs on one."""
    if GPU_MARK.search(source):
        return True
    return DEVICE_FIXTURE.search(source) is not None and DEVICE_PARAMETER.search(source) is None


OWN_PACKAGES = ("megarl", "megarl_kernels", "tests", "benchmarks")


class MissingPackages:
    """Skips files and folders that need a package which is not installed where tests of GPUs are chosen.

    A plugin of its own: pytest does not call hooks of this file for a folder whose conftest.py cannot be imported.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.outcome == "failed" and GPU_MARKS.fullmatch(collector.config.option.markexpr):
            error: BaseException | None = report.call.excinfo.value  # type: ignore[attr-defined]
            while error is not None and not isinstance(error, ModuleNotFoundError):
                error = error.__cause__
            package = str(error.name).partition(".")[0] if error is not None else OWN_PACKAGES[0]
            if package not in OWN_PACKAGES:
                report.outcome = "skipped"
                report.longrepr = (str(collector.path), 1, f"Skipped: needs {package}, which is not installed")
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin for missing packages."""
    config.pluginmanager.register(MissingPackages())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, and keep their modules out of those during the tests.

    Collecting imports torch, Transformers and megatron-core: millions of objects, none of them garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


GUARDED_VARIABLES = re.compile(r"MEGARL_|TRITON_|CUDA_|PYTHONPATH$|PATH$|RAY_A")
"""Environment variables that change what tests do. Others are set by packages when they are imported."""


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Fail a test that leaves another environment for the tests after it in the process."""
    before = _guarded_environment()
    yield
    assert _guarded_environment() == before


def _guarded_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if GUARDED_VARIABLES.match(name)}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say so where no test of GPUs has run: pytest succeeds if all are skipped."""
    outcomes = terminalreporter.stats
    if GPU_MARKS.fullmatch(config.option.markexpr) and not any(outcomes.get(o) for o in ("passed", "failed", "error")):
        skipped = len(outcomes.get("skipped", ()))
        terminalreporter.write_line(f"no test of GPUs has run: {skipped} skipped", yellow=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note in pytest's cache how the run has ended, for `tests/maintenance/repeat_failed.py`."""
    if not hasattr(session.config, "workerinput") and hasattr(session.config, "cache"):
        session.config.cache.set(EXIT_STATUS, int(exitstatus))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Replace surrogates in what a process reports, which would end the whole session if a test fails with some."""
    return map_text((yield), replace_surrogates)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests of a process; refuse names that differ between processes, which would end the whole session."""
    for item in items:
        if re.search(r"\Wat\W0x", item.nodeid):
            raise pytest.UsageError(f"{item.nodeid} has the address of an object in its name: give its parameters ids")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: position(item.nodeid))
    items[:] = [
        item
        for _, sharing in itertools.groupby(items, _shared_by)
        for item in sorted(sharing, key=lambda item: item.get_closest_marker("last") is not None)
    ]


def _shared_by(item: pytest.Item) -> tuple[object, ...]:
    """Return the module of a test and the parameters of the module's fixtures: tests with equal ones share them."""
    call = getattr(item, "callspec", None)
    shared = (
        () if call is None else (id(v) for name, v in call.params.items() if call._arg2scope[name].name != "Function")
    )
    return (item.nodeid.partition("::")[0], *shared)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need more CUDA devices than there are, unless Triton's interpreter stands in for one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed:
        import torch

        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA device{'s' if needed > 1 else ''}, found {found}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on the CPU, as without CUDA devices, and on one CUDA device."""
    import torch

    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return str(request.param)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start a local Ray cluster with `CLUSTER_SLOTS` slots for the session; this process is its driver."""
    import ray

    from megarl.cluster.placement.pool import start_cluster
    from megarl.config.placement import PlacementConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        # rollout workers import reward functions from tests
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])))
        assert start_cluster(PlacementConfig(slots_per_node=CLUSTER_SLOTS))
        yield
        ray.shutdown()
