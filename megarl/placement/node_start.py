"""Start of a Ray node by this process: however slow the machine is, and with the reason when it fails."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import services
from ray._raylet import persist_port  # type: ignore[attr-defined]

from megarl.errors import WorkerError
from megarl.process.ports import find_unused_ports

LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")
"""Parameters of Ray's `start_raylet` with the ports of the raylet's two agents."""

_FAILURE = re.compile(r"\[[^]]* [CEF] [^]]*\] \(raylet\) ")
"""Beginning of a line in the raylet's log that reports an error."""


@contextmanager
def node_start(seconds: float, limit_name: str) -> Iterator[None]:
    """Let the Ray node that is started within the block take up to `seconds`; stop waiting when its raylet has ended.

    Ray itself waits 30 s for a node, and its raylet aborts when an agent, a Python program with many imports, needs
    more than 15 s to choose its ports (ray-project/ray#65983). So the ports are chosen here, and the raylet need not
    wait. Ray looks a node up for up to 30 s (RAY_raylet_start_wait_time_s), so that the block may end that much later.

    Args:
        limit_name: name of the time limit in messages.

    Raises:
        WorkerError: the raylet ended, with the end of its log, or the node did not start in time.
    """
    get_node, start_raylet = services.get_node, services.start_raylet
    deadline = time.monotonic() + seconds
    raylet: Any = None
    logs: list[str | None] = []

    def start_raylet_with_ports(*args: Any, **kwargs: Any) -> Any:
        nonlocal raylet, logs
        given = inspect.signature(start_raylet).bind(*args, **kwargs).arguments
        given |= zip(AGENT_PORTS, find_unused_ports(len(AGENT_PORTS)), strict=True)
        # Ray passes this port to the agent only; the raylet looks for it in the file that the agent writes
        persist_port(given["session_dir"], given["node_id"], LISTEN_PORT, given[LISTEN_PORT])
        # time that the raylet gives its agents to answer, from the first request on; 30 s by default
        patience = {"RAY_agent_register_timeout_ms": f"{1000 * seconds:.0f}"}
        given["env_updates"] = patience | (given.get("env_updates") or {})
        logs = [given.get("raylet_stdout_filepath"), given.get("raylet_stderr_filepath")]
        started = start_raylet(**given)
        raylet = started.process
        return started

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as e:  # the node is not registered yet
                if raylet is not None and (code := raylet.poll()) is not None:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    raise WorkerError(f"Ray did not start: its raylet ended with {how}: {_read_failure(logs)}") from e
                if time.monotonic() >= deadline:
                    raise WorkerError(f"Ray did not start within {seconds:g} s ({limit_name})") from e

    services.get_node, services.start_raylet = wait_for_node, start_raylet_with_ports
    try:
        yield
    finally:
        services.get_node, services.start_raylet = get_node, start_raylet


def _read_failure(logs: list[str | None]) -> str:
    """Return the last error that the raylet reported in `logs`, or the last line; name the logs if they are empty."""
    lines = [line for log in logs if log for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    failures = [line for line in lines if _FAILURE.match(line)]
    return (failures or lines or [f"its logs {logs} are empty"])[-1].strip()
