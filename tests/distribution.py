"""Distribution of the tests over the processes of `pytest -n`: which tests share a process, and their order.

Tests with the same scope run in one process, in the order of their files. Scopes start in the order of `POSITIONS`,
the longest first, so that all processes are busy until the end.
"""

from __future__ import annotations

from fnmatch import fnmatch

SHARED_FIXTURES = {
    "undisturbed": (
        "tests/end_to_end/test_resume.py",
        "tests/end_to_end/test_train.py",
    ),
    "cluster": (
        "tests/benchmarks/test_controller.py",
        "tests/end_to_end/test_boxes.py",
        "tests/end_to_end/test_components.py",
        "tests/end_to_end/test_disaggregated.py",
        "tests/end_to_end/test_families.py",
        "tests/end_to_end/test_lost_engines.py",
        "tests/end_to_end/test_multi_node_engine.py",
        "tests/end_to_end/test_multi_turn.py",
        "tests/end_to_end/test_offline_commands.py",
        "tests/end_to_end/test_preferences.py",
        "tests/end_to_end/test_schedules.py",
        "tests/run/remote/test_auxiliary_models.py",
        "tests/cluster/placement/test_pool.py",
        "tests/controller/preflight/test_cluster_check.py",
        "tests/cluster/workers/test_group.py",
    ),
    "slurm": ("tests/cluster/launch/slurm/test_*.py",),
    "hosts": ("tests/cluster/launch/test_*hosts*.py",),
    "engine": (
        "tests/engines/sglang/test_cpu_determinism.py",
        "tests/engines/sglang/test_in_flight.py",
        "tests/engines/sglang/test_sglang_engine.py",
        "tests/engines/sglang/weight_update/test_update_session.py",
    ),
}
"""Session fixtures that start processes for seconds, and the files of the tests that share them."""

INDEPENDENT = ("tests/end_to_end/test_*.py", "tests/megatron/fidelity/test_layouts.py")
"""Files whose tests share nothing that takes long: each test is a scope of its own."""

POSITIONS = (
    *SHARED_FIXTURES,
    "tests/end_to_end/*",
    "tests/rollout/*",
    "tests/engines/*",
    "tests/megatron/*",
    "tests/cluster/launch/*",
    "*",
)


def scope(nodeid: str) -> str:
    """Return the scope of a test: a shared fixture, its file, or the test itself."""
    file = nodeid.partition("::")[0]
    for fixture, patterns in SHARED_FIXTURES.items():
        if any(fnmatch(file, pattern) for pattern in patterns):
            return fixture
    return nodeid if any(fnmatch(file, pattern) for pattern in INDEPENDENT) else file


def position(nodeid: str) -> int:
    """Return the position of a test's scope: lower ones start first."""
    name = scope(nodeid)
    return next(i for i, start in enumerate(POSITIONS) if name == start or fnmatch(name, start))
