"""This node's part of Ray: a child process that lives as long as the run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from megarl.errors import LaunchError
from megarl.launch.node_world import FIRST_PORT, PORT_SPAN, SECRET_VARIABLE
from megarl.placement.hardware import store_bytes
from megarl.placement.network import interface_of, interface_variables, is_loopback
from megarl.process.child_processes import Children

RAY_START = "megarl.launch.ray_start"
IS_UP = "Ray runtime started"
"""What `ray start` says when its processes run and the head knows of them."""

START_SECONDS = 120.0
"""How long Ray may take on a node whose disks are busy."""
END_SECONDS = 5.0
"""How long its processes may take to end, before they are killed."""
LAST_WORDS_SECONDS = 1.0
LAST_LINES = 15
"""Of what it said, for errors."""

_CHATTER = re.compile(r"\s*(\[state-dump\]|\[[^]]* I |$)")
"""In the logs of a process that died, of which Ray shows the ends."""

MOST_STORE = 16 * 2**30
"""Bytes of a node's object store."""


class RayNode:
    """`ray start --block` as a child.

    It imports Ray at once, and waits to be told how to start it.
    """

    def __init__(self, children: Children, environment: Mapping[str, str]) -> None:
        self._child = children.start(
            [sys.executable, "-m", RAY_START],
            ray_environment(environment),
            when_parent_dies=signal.SIGTERM,
            is_told=True,
            is_heard=True,
        )
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._up = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def start(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Return when this node is one of Ray's.

        Args:
            arguments: of `ray start`.
            environment: what workers find in theirs beside the launcher's own.

        Raises:
            LaunchError: Ray did not start; says what it said.
        """
        order = {"arguments": [*arguments, "--block"], "environment": dict(environment)}
        self._child.tell(json.dumps(order).encode() + b"\n")
        up = asyncio.create_task(self._up.wait())
        await asyncio.wait((up, self._child.ended), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if not self._up.is_set():
            within = "" if self._child.ended.done() else f" within {START_SECONDS:g} s"
            raise LaunchError(f"Ray did not start{within}:\n{await self._last_words()}")

    async def lost(self) -> str:
        """Wait until it ends, which it should not; returns what it said last."""
        await asyncio.wait((self._child.ended,))
        return f"Ray ended:\n{await self._last_words()}"

    async def stop(self) -> None:
        """End Ray's processes on this node."""
        await self._child.end(END_SECONDS)
        self._reading.cancel()

    async def _read(self) -> None:
        async for line in await self._child.output():
            text = line.decode(errors="replace").rstrip()
            if not _CHATTER.match(text):
                self._said.append(text)
            if IS_UP in text:
                self._up.set()

    async def _last_words(self) -> str:
        # not to the end of the file, which a process that Ray has left behind may keep open
        await asyncio.wait((self._reading,), timeout=LAST_WORDS_SECONDS)
        return "\n".join(f"  {line}" for line in self._said)


def ray_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What Ray and the command get of `environment`."""
    # torchrun's place in the world is the launcher's: a worker has its own
    kept = {name: value for name, value in environment.items() if not _is_torchruns(name) and name != "RAY_ADDRESS"}
    secret = kept.pop(SECRET_VARIABLE, "")
    if "RAY_AUTH_MODE" not in kept:
        # without a secret no token: `ray start` would take one from the home folder of the head alone
        kept["RAY_AUTH_MODE"] = "token" if secret else "disabled"
        if secret:
            kept["RAY_AUTH_TOKEN"] = hashlib.sha256(f"ray {secret}".encode()).hexdigest()
    # when Ray is told to end, nothing on it is worth waiting for
    kept["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    return kept


def _is_torchruns(name: str) -> bool:
    return name.startswith("TORCHELASTIC_") or name in {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }


def ray_arguments(
    *, rank: int, node_address: str, ray_address: str, cpus: int, gpus: int | None, labels: Mapping[str, str]
) -> list[str]:
    """Of `ray start` for a node.

    Args:
        ray_address: `HOST:PORT`, where rank 0 makes it and the others find it.
        gpus: None: those that Ray finds.
    """
    arguments = {
        "--node-ip-address": node_address,
        "--num-cpus": str(cpus),
        # a system's ports instead of fixed ones: two runs, or two nodes, may share a machine
        "--min-worker-port": "0",
        "--max-worker-port": "0",
        "--dashboard-agent-listen-port": "0",
        "--object-store-memory": str(store_bytes(most=MOST_STORE)),
        "--include-log-monitor": "false",
        "--log-color": "false",
        "--temp-dir": _temp_dir(rank),
        "--labels": ",".join(f"{key}={value}" for key, value in labels.items()),
    }
    if gpus is not None:
        arguments["--num-gpus"] = str(gpus)
    if rank:
        arguments["--address"] = ray_address
    else:
        port = ray_address.rpartition(":")[2]
        arguments |= {"--port": port, "--ray-client-server-port": str(free_port()), "--include-dashboard": "false"}
    words = [word for pair in arguments.items() for word in pair]
    return words if rank else ["--head", "--disable-usage-stats", "--no-monitor", *words]


def _temp_dir(rank: int) -> str:
    """Of this user, whom other users' files do not stop, and of this node, which may share its machine."""
    # short, since sockets lie in it, whose paths may have 107 characters
    return str(Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ray-{os.getuid()}" / f"node{rank}")  # noqa: S108


def free_port() -> int:
    """A TCP port that nobody listens at, and that the system gives to nobody who does not name it."""
    while True:
        port = random.randrange(FIRST_PORT, FIRST_PORT + PORT_SPAN)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def interface_environment(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Collectives go through the interface of `address`, unless the user chose one; empty on the loopback."""
    interface = None if is_loopback(address) else interface_of(address)
    return {} if interface is None else interface_variables(interface, environment)
