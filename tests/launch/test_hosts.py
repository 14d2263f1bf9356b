"""The hosts that other tests run on: what they share, and what not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.launched import wait_until
from tests.launch.hosts import Host, Hosts, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SERVE = """
import hashlib, socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    while True:
        one, _ = server.accept()
        with one, one.makefile("rb") as file:
            one.sendall(hashlib.md5(file.read()).hexdigest().encode())
"""

ASK = """
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


def ask(host: Host, server: str, num_bytes: int, timeout: float) -> float:
    """Seconds until the server has answered the call; what is sent then must arrive whole."""
    return float(host.run(sys.executable, "-S", "-c", ASK, server, str(num_bytes), str(timeout)))


def test_they_share_a_network_and_files_and_nothing_else(
    hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    a, b = hosts
    server = b.start(sys.executable, "-S", "-c", SERVE)
    server.wait_until_it_says("listening", 5)
    assert a.run("hostname") == "a\n"
    ask(a, "b", 5_000_000, 5)  # by now each knows the other's hardware address
    delayed = request.node.callspec.params["hosts"]
    assert (ask(a, "b", 10, 5) >= 2 * DELAY) == bool(delayed)
    with pytest.raises(AssertionError, match="ConnectionRefusedError"):
        ask(a, "127.0.0.1", 1, 5)
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
    assert SERVE not in a.run("ps", "ax")
    server.send(2)
    assert server.wait(5) != 0


def test_one_that_is_cut_off_neither_hears_nor_is_heard_until_it_is_back(hosts: Hosts) -> None:
    a, b = hosts
    b.start(sys.executable, "-S", "-c", SERVE).wait_until_it_says("listening", 5)
    ask(a, "b", 10, 5)
    hosts.cut_off(b)
    assert "state UP" in b.run("ip", "link", "show", "eth0")
    with pytest.raises(AssertionError, match="timed out"):
        ask(a, b.address, 10, 0.3)
    hosts.rejoin(b)
    ask(a, b.address, 10, 5)


def sleeping(host: Host) -> list[str]:
    return sorted(p.cmdline()[-1] for p in host.processes() if p.name() == "sleep")


def test_nothing_outlives_them(tmp_path: Path) -> None:
    with Hosts(1, tmp_path) as hosts:
        (a,) = hosts
        a.start("sh", "-c", "trap '' HUP INT TERM; setsid sleep 1000 & sleep 1001")
        a.start("sleep", "1002")
        assert wait_until(lambda: sleeping(a) == ["1000", "1001", "1002"], 5), a.processes()
        running = a.processes()
    psutil.wait_procs(running, 5)
    a.assert_nothing_runs(0)
