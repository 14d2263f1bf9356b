"""Tests of the simulated hosts: what they share and what they isolate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.launched import wait_until
from tests.launch.hosts import Host, Hosts, missing
from tests.time_limits import HANG_SECONDS

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

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
import hashlib, os, socket, sys, time
begun = time.monotonic()
one = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3]))
print(time.monotonic() - begun)
content = os.urandom(int(sys.argv[2]))
one.sendall(content)
one.shutdown(socket.SHUT_WR)
assert one.makefile().read() == hashlib.md5(content).hexdigest()
"""

DELAY = 0.03


@pytest.fixture(params=[0.0, DELAY], ids=["bridge", "relay"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path, delay=request.param) as hosts:
        yield hosts


def send_bytes(host: Host, server: str, num_bytes: int, timeout: float = HANG_SECONDS) -> float:
    """Send bytes to the server and check their digest; return the seconds that connecting took."""
    return float(host.run(sys.executable, "-S", "-c", CLIENT, server, str(num_bytes), str(timeout)))


def test_hosts_share_only_network_and_files(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    a, b = hosts
    server = b.start(sys.executable, "-S", "-c", SERVER)
    server.wait_for_output("listening")
    assert a.run("hostname") == "a\n"
    send_bytes(a, "b", 5_000_000)  # from now on each knows the other's hardware address
    delayed = request.node.callspec.params["hosts"]
    assert (send_bytes(a, "b", 10) >= 2 * DELAY) == bool(delayed)
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
    server.send(2)
    assert server.wait() != 0


def test_host_that_is_cut_off_is_unreachable_until_it_rejoins(hosts: Hosts) -> None:
    a, b = hosts
    b.start(sys.executable, "-S", "-c", SERVER).wait_for_output("listening")
    send_bytes(a, "b", 10)
    hosts.cut_off(b)
    assert "state UP" in b.run("ip", "link", "show", "eth0")
    with pytest.raises(AssertionError, match="timed out"):
        send_bytes(a, b.address, 10, 0.3)
    hosts.rejoin(b)
    send_bytes(a, b.address, 10)


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
