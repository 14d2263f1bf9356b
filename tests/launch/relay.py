"""Network switch in user space: forwards Ethernet frames between network interfaces with a delay.

    python relay.py SECONDS INTERFACE INTERFACE ...      stdin: `cut INTERFACE` and `join INTERFACE`, each answered `ok`

All frames from and to an interface that is cut are dropped silently, including those in flight.
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
"""Size of struct virtio_net_hdr before each frame; keeps large segments and partial checksums as they are."""
MAX_FRAME_BYTES = HEADER_BYTES + 2**17

MAX_FRAMES_PER_TURN = 64
"""Maximum number of frames read from one interface before the others get their turn."""

INTERFACE_GONE_ERRORS = {errno.ENETDOWN, errno.ENXIO, errno.ENODEV}
"""Error numbers of an interface whose host has ended."""


class Relay:
    """A learning switch: remembers which hardware address is behind which interface."""

    def __init__(self, delay: float, interfaces: list[str]) -> None:
        self._delay = delay
        self._sockets = {name: _open(name) for name in interfaces}
        self._interface_of_address: dict[bytes, str] = {}
        self._cut: set[str] = set()
        self._in_flight: deque[tuple[float, str, bytes]] = deque()

    def run(self) -> None:
        """Forward frames until stdin ends."""
        selector = selectors.DefaultSelector()
        for name, one in self._sockets.items():
            selector.register(one, selectors.EVENT_READ, name)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select(self._seconds_to_next_frame()):
                if key.data is None:
                    if not self._run_commands(os.read(sys.stdin.fileno(), 4096).decode()):
                        return
                elif not self._read_frames(key.data):
                    selector.unregister(key.fileobj)
            self._deliver()

    def _seconds_to_next_frame(self) -> float | None:
        return max(0.0, self._in_flight[0][0] - time.monotonic()) if self._in_flight else None

    def _run_commands(self, commands: str) -> bool:
        for line in commands.splitlines():
            what, name = line.split()
            (self._cut.add if what == "cut" else self._cut.discard)(name)
            _acknowledge()
        return bool(commands)

    def _read_frames(self, name: str) -> bool:
        """Read pending frames of an interface; return False if the interface is gone."""
        for _ in range(MAX_FRAMES_PER_TURN):
            try:
                frame = self._sockets[name].recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in INTERFACE_GONE_ERRORS:
                    return False
                raise
            if name not in self._cut:
                self._interface_of_address[frame[HEADER_BYTES + 6 : HEADER_BYTES + 12]] = name
                self._in_flight.append((time.monotonic() + self._delay, name, frame))
        return True

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= now:
            _, source, frame = self._in_flight.popleft()
            target = self._interface_of_address.get(frame[HEADER_BYTES : HEADER_BYTES + 6])
            for name in [target] if target else self._sockets:
                if name != source and not self._cut & {name, source}:
                    self._send(name, frame)

    def _send(self, name: str, frame: bytes) -> None:
        try:
            self._sockets[name].send(frame)
        except OSError as error:
            if error.errno not in INTERFACE_GONE_ERRORS:
                raise


def _open(interface: str) -> socket.socket:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    one.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    one.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    one.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    one.bind((interface, ETH_P_ALL))
    one.setblocking(False)
    return one


def _acknowledge() -> None:
    sys.stdout.write("ok\n")
    sys.stdout.flush()


if __name__ == "__main__":
    relay = Relay(float(sys.argv[1]), sys.argv[2:])
    _acknowledge()
    relay.run()
