"""Tests of the simulated hosts: what they share and what they isolate."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.hosts import Host, Hosts
from tests.time_limits import HANG_SECONDS, wait_until

SERVER = """
import hashlib, socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    while True:
        one, _ = server.accept()
        with one, one.makefile("rb") as file:
            one.sendall(hashlib.md5(file.read()).hexdigest().encode())
"""

CLIENT = """
import hashlib, os, socket, sys
one = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3]))
content = os.urandom(int(sys.argv[2]))
one.sendall(content)
one.shutdown(socket.SHUT_WR)
assert one.makefile().read() == hashlib.md5(content).hexdigest()
"""


def send_bytes(host: Host, server: str, num_bytes: int, timeout: float = HANG_SECONDS) -> None:
    """Send bytes to the server and check their digest."""
    host.run(sys.executable, "-S", "-c", CLIENT, server, str(num_bytes), str(timeout))


def check_cut_off(hosts: Hosts, a: Host, b: Host) -> None:
    """A host that is cut off is unreachable until it rejoins."""
    hosts.cut_off(b)
    assert "state UP" in b.run("ip", "link", "show", "eth0")
    with pytest.raises(AssertionError, match="timed out"):
        send_bytes(a, b.address, 10, 0.3)
    hosts.rejoin(b)
    send_bytes(a, b.address, 10)


def test_hosts_share_only_network_and_files(hosts: Hosts, tmp_path: Path) -> None:
    a, b = hosts
    server = b.start(sys.executable, "-S", "-c", SERVER)
    server.wait_for_output("listening")
    assert a.run("hostname") == "a\n"
    send_bytes(a, "b", 5_000_000)
    with pytest.raises(AssertionError, match="ConnectionRefusedError"):
        send_bytes(a, "127.0.0.1", 1)
    assert a.run("getent", "hosts", "a", "b").split() == ["127.0.1.1", "a", "10.77.0.2", "b"]
    for folder in ("/tmp", "/dev/shm"):
        a.run("touch", f"{folder}/mine")
        assert b.run("find", folder, "-name", "mine") == ""
    a.run("touch", tmp_path / "ours")
    assert b.run("ls", tmp_path / "ours") == f"{tmp_path / 'ours'}\n"
    assert not (Path("/tmp") / "mine").exists()
    assert [p.name() for p in b.processes()] == ["python"]
    assert not a.processes()
    assert "sleep infinity" in b.run("ps", "ax")
    assert SERVER not in a.run("ps", "ax")
    check_cut_off(hosts, a, b)
    server.send(2)
    assert server.wait() != 0


def find_sleep_arguments(host: Host) -> list[str]:
    return sorted(p.cmdline()[-1] for p in host.processes() if p.name() == "sleep")


def test_no_process_outlives_its_host(tmp_path: Path) -> None:
    with Hosts(1, tmp_path) as hosts:
        (a,) = hosts
        a.start("sh", "-c", "trap '' HUP INT TERM; setsid sleep 1000 & sleep 1001")
        a.start("sleep", "1002")
        assert wait_until(lambda: find_sleep_arguments(a) == ["1000", "1001", "1002"]), a.processes()
        running = a.processes()
    psutil.wait_procs(running, HANG_SECONDS)
    a.assert_nothing_runs(0)
