"""A switch as a program: carries every Ethernet frame between network interfaces, some time later.

    python relay.py SECONDS INTERFACE INTERFACE ...      stdin: `cut INTERFACE` and `join INTERFACE`, each answered `ok`

All frames from and to an interface that is cut are lost, those under way too; nobody is told.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE = 33

BUFFER_BYTES = 2**25
HEADER_BYTES = 10
"""The kernel's notes on a frame (struct virtio_net_hdr): large segments and open checksums pass as they are."""
MAX_FRAME_BYTES = HEADER_BYTES + 2**17

FRAMES_AT_ONCE = 64
"""Read from one interface before the others have their turn."""

GONE = {errno.ENETDOWN, errno.ENXIO, errno.ENODEV}
"""Of an interface whose host has ended."""


class Relay:
    """Learns which address is behind which interface, as a switch does."""

    def __init__(self, delay: float, interfaces: list[str]) -> None:
        self._delay = delay
        self._sockets = {name: _open(name) for name in interfaces}
        self._behind: dict[bytes, str] = {}
        self._cut: set[str] = set()
        self._under_way: deque[tuple[float, str, bytes]] = deque()

    def run(self) -> None:
        """Until stdin ends."""
        selector = selectors.DefaultSelector()
        for name, one in self._sockets.items():
            selector.register(one, selectors.EVENT_READ, name)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select(self._patience()):
                if key.data is None:
                    if not self._obey(os.read(sys.stdin.fileno(), 4096).decode()):
                        return
                elif not self._take(key.data):
                    selector.unregister(key.fileobj)
            self._deliver()

    def _patience(self) -> float | None:
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def _obey(self, orders: str) -> bool:
        for line in orders.splitlines():
            what, name = line.split()
            (self._cut.add if what == "cut" else self._cut.discard)(name)
            _say_ok()
        return bool(orders)

    def _take(self, name: str) -> bool:
        """False where the interface is gone."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = self._sockets[name].recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in GONE:
                    return False
                raise
            if name not in self._cut:
                self._behind[frame[HEADER_BYTES + 6 : HEADER_BYTES + 12]] = name
                self._under_way.append((time.monotonic() + self._delay, name, frame))
        return True

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, source, frame = self._under_way.popleft()
            target = self._behind.get(frame[HEADER_BYTES : HEADER_BYTES + 6])
            for name in [target] if target else self._sockets:
                if name != source and not self._cut & {name, source}:
                    self._send(name, frame)

    def _send(self, name: str, frame: bytes) -> None:
        try:
            self._sockets[name].send(frame)
        except OSError as error:
            if error.errno not in GONE:
                raise


def _open(interface: str) -> socket.socket:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    one.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    one.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    one.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    one.bind((interface, ETH_P_ALL))
    one.setblocking(False)
    return one


def _say_ok() -> None:
    sys.stdout.write("ok\n")
    sys.stdout.flush()


if __name__ == "__main__":
    relay = Relay(float(sys.argv[1]), sys.argv[2:])
    _say_ok()
    relay.run()
