"""The Ray processes of this node: a `ray start` child process that lives as long as the run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from megarl.cluster.launch.node_world import SECRET_VARIABLE
from megarl.cluster.placement.hardware import (
    inline_environment,
    interface_of,
    interface_variables,
    is_loopback,
    object_store_bytes,
)
from megarl.cluster.process.child_processes import ChildProcesses
from megarl.errors import LaunchError

RAY_START = "megarl.cluster.launch.ray_start"
RAY_STARTED_MESSAGE = "Ray runtime started"
"""Output of `ray start` once its processes run and are registered with the head."""

START_TIMEOUT_SECONDS = 120.0
"""Time limit for starting Ray; generous, for nodes with busy disks."""
STOP_GRACE_SECONDS = 5.0
"""Time from SIGTERM to SIGKILL for Ray's processes."""
TAIL_TIMEOUT_SECONDS = 1.0
NUM_TAIL_LINES = 15
"""Number of lines of Ray's output shown in errors."""

_NOISE = re.compile(r"\s*(\[state-dump\]|\[[^]]* I |$)")
"""Uninformative lines in the log tails that Ray prints for processes that died."""

MAX_OBJECT_STORE_BYTES = 16 * 2**30
"""Upper limit of a node's object store, in bytes."""


class RayNode:
    """`ray start --block` as a child process.

    It imports Ray at once, then waits for the arguments on stdin.

    Args:
        environment: environment of the process, see `make_ray_environment`.
    """

    def __init__(self, children: ChildProcesses, environment: Mapping[str, str]) -> None:
        self._child = children.start(
            [sys.executable, "-m", RAY_START],
            environment,
            parent_death_signal=signal.SIGTERM,
            has_stdin=True,
            capture_output=True,
        )
        self._recent_lines: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._started = asyncio.Event()
        self._read_task = asyncio.create_task(self._read())

    async def start(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Start Ray and return when this node has joined the cluster.

        Args:
            arguments: arguments of `ray start`.
            environment: variables for Ray and its workers in addition to the environment of the process.

        Raises:
            LaunchError: Ray did not start; the message has the end of its output.
        """
        request = {
            "arguments": [*arguments, "--block"],
            "environment": dict(environment),
            "timeout_seconds": START_TIMEOUT_SECONDS,
        }
        self._child.send_line(json.dumps(request).encode() + b"\n")
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait(
            (started, self._child.ended), timeout=START_TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        started.cancel()
        if not self._started.is_set():
            within = "" if self._child.ended.done() else f" within {START_TIMEOUT_SECONDS:g} s"
            raise LaunchError(f"Ray did not start{within}:\n{await self._output_tail()}")

    async def wait_until_ended(self) -> str:
        """Wait until Ray ends, which it normally does not; return an error message with the end of its output."""
        await asyncio.wait((self._child.ended,))
        return f"Ray ended:\n{await self._output_tail()}"

    async def stop(self) -> None:
        """Terminate Ray's processes on this node."""
        await self._child.terminate(STOP_GRACE_SECONDS)
        self._read_task.cancel()

    async def _read(self) -> None:
        async for line in await self._child.output():
            text = line.decode(errors="replace").rstrip()
            if not _NOISE.match(text):
                self._recent_lines.append(text)
            if RAY_STARTED_MESSAGE in text:
                self._started.set()

    async def _output_tail(self) -> str:
        # do not wait for end of file: a process that Ray has left behind may keep the pipe open
        await asyncio.wait((self._read_task,), timeout=TAIL_TIMEOUT_SECONDS)
        return "\n".join(f"  {line}" for line in self._recent_lines)


def make_ray_environment(environment: Mapping[str, str], *, has_secret: bool) -> dict[str, str]:
    """Return the environment of Ray and of the command, made from the launcher's `environment`.

    The token of Ray is added when the nodes have met.
    """
    # torchrun's ranks are those of the launcher: each worker gets its own
    excluded = {"RAY_ADDRESS", SECRET_VARIABLE}
    kept = {
        name: value for name, value in environment.items() if not _is_torchrun_variable(name) and name not in excluded
    }
    # without a secret disable tokens: otherwise `ray start` uses one found in the home folder of the head only
    kept.setdefault("RAY_AUTH_MODE", "token" if has_secret else "disabled")
    kept |= inline_environment(kept)
    # when Ray is terminated, no work on it is worth waiting for
    kept["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    return kept


def _is_torchrun_variable(name: str) -> bool:
    return name.startswith("TORCHELASTIC_") or name in {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }


def make_ray_arguments(
    *, rank: int, node_address: str, ray_address: str, cpus: int, gpus: int | None, labels: Mapping[str, str]
) -> list[str]:
    """Return the arguments of `ray start` for a node.

    Args:
        ray_address: `HOST:PORT` at which rank 0 starts Ray's head and the other nodes join it.
        gpus: number of GPUs; None: all that Ray finds.
    """
    arguments = {
        "--node-ip-address": node_address,
        "--num-cpus": str(cpus),
        # ports chosen by the system instead of fixed ones: two runs, or two Ray nodes, may share a machine
        "--min-worker-port": "0",
        "--max-worker-port": "0",
        "--dashboard-agent-listen-port": "0",
        "--object-store-memory": str(object_store_bytes(max_bytes=MAX_OBJECT_STORE_BYTES)),
        "--include-log-monitor": "false",
        "--log-color": "false",
        "--temp-dir": _find_temp_dir(rank),
        "--labels": ",".join(f"{key}={value}" for key, value in labels.items()),
    }
    if gpus is not None:
        arguments["--num-gpus"] = str(gpus)
    if rank:
        arguments["--address"] = ray_address
    else:
        arguments |= {"--port": ray_address.rpartition(":")[2], "--include-dashboard": "false"}
    words = [word for pair in arguments.items() for word in pair]
    return words if rank else ["--head", "--disable-usage-stats", "--no-monitor", *words]


def _find_temp_dir(rank: int) -> str:
    """Return a temporary folder specific to this user and this node, which may share a machine with others."""
    # kept short: it contains sockets, whose paths may have at most 107 characters
    return str(Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ray-{os.getuid()}" / f"node{rank}")  # noqa: S108


def make_interface_environment(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make NCCL and Gloo use the interface of `address`; empty on the loopback.

    Variables that `environment` already sets are left out.
    """
    interface = None if is_loopback(address) else interface_of(address)
    return {} if interface is None else interface_variables(interface, environment)
