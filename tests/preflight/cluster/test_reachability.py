from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest

from megarl.preflight.cluster import reachability
from megarl.preflight.cluster.reachability import Address, EchoServer, Interface, gloo_interface, probe
from tests.time_limits import HANG_SECONDS


@pytest.fixture
def server() -> Iterator[EchoServer]:
    server = EchoServer("node a", address="127.0.0.1")
    yield server
    server.close()


def at(port: int, name: str = "node a") -> Address:
    return Address(name=name, host="127.0.0.1", port=port)


def test_a_server_replies_to_all_clients(server: EchoServer) -> None:
    assert probe([at(server.port)] * 200, seconds=HANG_SECONDS) == [None] * 200  # 64 at a time
    assert probe([], seconds=HANG_SECONDS) == []
    assert str(at(7)) == "127.0.0.1:7"
    assert str(Address(name="a", host="fd00::1", port=7)) == "[fd00::1]:7"


def test_the_reason_is_reported_per_address(server: EchoServer) -> None:
    closed = EchoServer("node a", address="127.0.0.1")
    closed.close()
    answers = probe([at(closed.port), at(server.port, "node b"), at(server.port)], seconds=HANG_SECONDS)
    assert answers == ["connection refused", "another host answers at this address", None]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert probe([at(silent.getsockname()[1])], seconds=0.2) == ["timed out"]


def test_the_interface_of_gloo_socket_ifname(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = next(name for name, all_ in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in all_})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{loopback},eth9")
    assert gloo_interface() == Interface(name=loopback, address="127.0.0.1", is_chosen=True)
    assert gloo_interface().is_loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert gloo_interface() == Interface(name="eth9", address=None, is_chosen=True)
    assert not gloo_interface().is_loopback


@pytest.mark.parametrize(
    ("resolves_to", "want"),
    [(["192.0.2.1", "127.0.0.1"], "127.0.0.1"), (["127.0.0.2"], "127.0.0.2"), ([], "127.0.0.1")],
)
def test_the_interface_of_the_host_name(resolves_to: list[str], want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.1 is reserved for documentation: no socket can bind to it."""

    def resolve(*_: object, **__: object) -> list[object]:
        if not resolves_to:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in resolves_to]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(reachability.socket, "getaddrinfo", resolve)
    found = gloo_interface()
    assert (found.address, found.is_chosen) == (want, False)
